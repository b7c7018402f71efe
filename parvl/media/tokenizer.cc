// The pytorch-tokenizers C++ library was looked at for this and is not used: it drops pieces that contain token id 0,
// ignores merges spelled as strings, and cannot keep special tokens that a user typed as text.
#include "parvl/media/tokenizer.h"

#include <algorithm>

#include "parvl/base/json.h"
#include "parvl/media/tokenizer_file.h"
#include "parvl/media/unicode.h"

namespace parvl {
namespace {

// The trusted parts of the text, in order, adjacent ones joined.
class TrustMap {
 public:
  void append(size_t length, bool trusted) {
    if (trusted && length > 0) {
      if (!ranges_.empty() && ranges_.back().end == size_) {
        ranges_.back().end += length;
      } else {
        ranges_.push_back({size_, size_ + length});
      }
    }
    size_ += length;
  }
  bool covers(TextRange range) const {
    auto it = std::upper_bound(ranges_.begin(), ranges_.end(), range.begin,
                               [](size_t at, const TextRange& r) { return at < r.begin; });
    return it != ranges_.begin() && range.end <= (it - 1)->end;
  }

 private:
  size_t size_ = 0;
  std::vector<TextRange> ranges_;
};

// A piece of text on its way to tokens: `text` is what the model sees, `origin` tells where in the input it stood.
struct Piece {
  std::string_view text;
  size_t offset = 0;                       // of `text` in the input, when not normalised
  const NormalizedText* origin = nullptr;  // when normalised: positions relative to `offset`
  size_t origin_at = 0;                    // where `text` starts in origin->text

  Piece part(TextRange range) const {
    Piece out = *this;
    out.text = text.substr(range.begin, range.end - range.begin);
    (origin == nullptr ? out.offset : out.origin_at) += range.begin;
    return out;
  }
  // A range of `text` in the input.
  TextRange in_input(TextRange range) const {
    if (origin == nullptr) return {offset + range.begin, offset + range.end};
    return {offset + origin->begin[origin_at + range.begin], offset + origin->end[origin_at + range.end - 1]};
  }
};

}  // namespace

struct Tokenizer::Impl {
  std::unique_ptr<TokenizerFile> file;
  AddedTokenMatcher raw, normalized;  // looked for before and after normalisation
  std::vector<uint8_t> special;       // by id

  void encode_words(const Piece& piece, std::vector<EncodedToken>& out) const;
  void encode_byte_level(const Piece& piece, std::vector<EncodedToken>& out) const;
  void encode_normalized(const Piece& piece, const TrustMap& trust, std::vector<EncodedToken>& out) const;
};

// The ByteLevel step and the merges of one word. A space put before it has no place of its own in the input.
void Tokenizer::Impl::encode_byte_level(const Piece& piece, std::vector<EncodedToken>& out) const {
  const size_t extra = file->add_prefix_space && piece.text[0] != ' ' ? 1 : 0;
  std::string with_space;
  if (extra > 0) with_space = " " + std::string(piece.text);
  const std::string_view text = extra > 0 ? std::string_view(with_space) : piece.text;
  std::vector<TextRange> words = {{0, text.size()}};
  if (file->byte_level_pattern != nullptr) words = split_text(text, {file->byte_level_pattern});
  for (const TextRange& word : words) {
    const size_t first = out.size();
    file->model.encode_word(text.substr(word.begin, word.end - word.begin), word.begin, out);
    for (size_t i = first; i < out.size(); ++i) {
      const TextRange local{out[i].begin - std::min(out[i].begin, extra), out[i].end - extra};
      const TextRange place = local.end > local.begin
                                  ? piece.in_input(local)
                                  : TextRange{piece.in_input({0, 1}).begin, piece.in_input({0, 1}).begin};
      out[i].begin = place.begin;
      out[i].end = place.end;
    }
  }
}

void Tokenizer::Impl::encode_words(const Piece& piece, std::vector<EncodedToken>& out) const {
  std::vector<TextRange> parts = {{0, piece.text.size()}};
  for (const SplitStep& step : file->splits) {
    std::vector<TextRange> finer;
    for (const TextRange& part : parts) {
      for (const TextRange& range : split_text(piece.text.substr(part.begin, part.end - part.begin), step)) {
        finer.push_back({part.begin + range.begin, part.begin + range.end});
      }
    }
    parts = std::move(finer);
  }
  for (const TextRange& part : parts) encode_byte_level(piece.part(part), out);
}

void Tokenizer::Impl::encode_normalized(const Piece& piece, const TrustMap& trust,
                                        std::vector<EncodedToken>& out) const {
  if (normalized.empty()) return encode_words(piece, out);
  const auto may_match = [&](TextRange range) { return trust.covers(piece.in_input(range)); };
  for (const AddedTokenMatcher::Piece& cut : normalized.cut(piece.text, may_match)) {
    if (cut.id < 0) {
      encode_words(piece.part(cut.range), out);
    } else {
      const TextRange place = piece.in_input(cut.range);
      out.push_back({cut.id, place.begin, place.end});
    }
  }
}

Tokenizer::Tokenizer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::~Tokenizer() = default;

absl::StatusOr<std::shared_ptr<const Tokenizer>> Tokenizer::load(const std::string& dir) {
  const std::string path = dir + "/tokenizer.json";
  PARVL_ASSIGN_OR_RETURN(Json json, read_json_file(path));
  return from_json(json, path);
}

absl::StatusOr<std::shared_ptr<const Tokenizer>> Tokenizer::from_json(const Json& json, const std::string& name) {
  auto file = read_tokenizer_file(json);
  if (!file.ok()) {
    const std::string_view message(file.status().message().data(), file.status().message().size());
    return with_context(absl::Status(file.status().code(), one_line(message, 500)), name);
  }
  auto impl = std::make_unique<Impl>();
  impl->file = *std::move(file);
  impl->special.resize(impl->file->bytes.size());
  for (AddedToken token : impl->file->added) {
    impl->special[static_cast<size_t>(token.id)] = token.special;
    NormalizedText normal;
    if (token.normalized && normalize(token.content, impl->file->nfc, normal)) token.content = normal.text;
    (token.normalized ? impl->normalized : impl->raw).add(token);
  }
  return std::shared_ptr<const Tokenizer>(new Tokenizer(std::move(impl)));
}

std::vector<EncodedToken> Tokenizer::encode(const std::vector<TextRun>& runs) const {
  std::string joined;
  TrustMap trust;
  for (const TextRun& run : runs) {
    if (runs.size() > 1) joined += run.text;
    trust.append(run.text.size(), run.trusted);
  }
  if (runs.empty()) return {};
  const std::string_view text = runs.size() == 1 ? std::string_view(runs[0].text) : std::string_view(joined);
  std::vector<EncodedToken> out;
  const auto may_match = [&](TextRange range) { return trust.covers(range); };
  for (const AddedTokenMatcher::Piece& cut : impl_->raw.cut(text, may_match)) {
    if (cut.id >= 0) {
      out.push_back({cut.id, cut.range.begin, cut.range.end});
      continue;
    }
    Piece piece{text.substr(cut.range.begin, cut.range.end - cut.range.begin), cut.range.begin};
    NormalizedText normal;
    if (normalize(piece.text, impl_->file->nfc, normal)) {
      piece.text = normal.text;
      piece.origin = &normal;
    }
    impl_->encode_normalized(piece, trust, out);
  }
  return out;
}

std::vector<TokenId> Tokenizer::encode(std::string_view text, bool trusted) const {
  std::vector<TokenId> ids;
  for (const EncodedToken& token : encode({{std::string(text), trusted}})) ids.push_back(token.id);
  return ids;
}

std::vector<TokenId> Tokenizer::encode_with_prefix(std::string_view text, bool trusted) const {
  std::vector<TokenId> ids = impl_->file->prefix;
  const std::vector<TokenId> own = encode(text, trusted);
  ids.insert(ids.end(), own.begin(), own.end());
  ids.insert(ids.end(), impl_->file->suffix.begin(), impl_->file->suffix.end());
  return ids;
}

std::string_view Tokenizer::token_bytes(TokenId id) const {
  if (id < 0 || static_cast<size_t>(id) >= impl_->file->bytes.size()) return {};
  return impl_->file->bytes[static_cast<size_t>(id)];
}

bool Tokenizer::is_special(TokenId id) const {
  return id >= 0 && static_cast<size_t>(id) < impl_->special.size() && impl_->special[static_cast<size_t>(id)] != 0;
}

bool Tokenizer::is_added(TokenId id) const {
  return std::any_of(impl_->file->added.begin(), impl_->file->added.end(),
                     [id](const AddedToken& token) { return token.id == id; });
}

std::string Tokenizer::decode(const std::vector<TokenId>& ids, bool skip_special) const {
  std::string bytes;
  for (const TokenId id : ids) {
    if (!skip_special || !is_special(id)) bytes += token_bytes(id);
  }
  return repair_utf8(bytes);
}

TokenId Tokenizer::id_of(std::string_view token) const {
  const auto it = impl_->file->id_by_text.find(absl::string_view(token.data(), token.size()));
  return it == impl_->file->id_by_text.end() ? -1 : it->second;
}

std::vector<std::string> Tokenizer::added_texts() const {
  std::vector<std::string> texts;
  for (const AddedToken& token : impl_->file->added) texts.push_back(token.content);
  return texts;
}

int64_t Tokenizer::vocab_size() const { return static_cast<int64_t>(impl_->file->bytes.size()); }

std::string Utf8Stream::push(std::string_view bytes) {
  pending_ += bytes;
  std::string out;
  size_t at = 0;
  while (at < pending_.size()) {
    const Utf8Step step = utf8_step(pending_, at);
    if (step.kind == Utf8Step::Kind::kIncomplete) break;
    out += step.kind == Utf8Step::Kind::kValid ? std::string_view(pending_).substr(at, step.length) : kReplacement;
    at += step.length;
  }
  pending_.erase(0, at);
  return out;
}

std::string Utf8Stream::flush() {
  std::string out = repair_utf8(pending_);
  pending_.clear();
  return out;
}

}  // namespace parvl
