#include "parvl/media/tokenizer_file.h"

#include <algorithm>
#include <set>

#include "parvl/media/unicode.h"

namespace parvl {
namespace {

constexpr int64_t kMaxId = 1 << 24;  // tables are indexed by id

// GPT-2's way of cutting words, which a ByteLevel step uses on its own.
constexpr char kByteLevelPattern[] = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// object[key] as a string; "" when absent.
absl::StatusOr<std::string> text_of(const Json& object, const std::string& key) {
  return json_value<std::string>(object, key, "");
}

absl::Status unsupported(const std::string& part, const std::string& type) {
  return invalid(part, " of type '", type, "' is not supported (byte-level BPE tokenizers are)");
}

// The list behind a Sequence, or the object itself as a list of one; empty for null.
absl::StatusOr<std::vector<const Json*>> steps_of(const Json& file, const std::string& part, const char* list_key) {
  std::vector<const Json*> steps;
  const auto it = file.find(part);
  if (it == file.end() || it->is_null()) return steps;
  if (!it->is_object()) return invalid("'", part, "' must be an object");
  PARVL_ASSIGN_OR_RETURN(std::string type, text_of(*it, "type"));
  if (type != "Sequence") {
    steps.push_back(&*it);
    return steps;
  }
  const auto list = it->find(list_key);
  if (list == it->end() || !list->is_array()) return invalid("'", part, "' is a Sequence without '", list_key, "'");
  for (const Json& step : *list) {
    if (!step.is_object()) return invalid("a step of '", part, "' must be an object");
    steps.push_back(&step);
  }
  return steps;
}

absl::Status read_normalizer(const Json& file, TokenizerFile& out) {
  PARVL_ASSIGN_OR_RETURN(auto steps, steps_of(file, "normalizer", "normalizers"));
  for (const Json* step : steps) {
    PARVL_ASSIGN_OR_RETURN(std::string type, text_of(*step, "type"));
    if (type != "NFC") return unsupported("normalizer", type);
    out.nfc = true;
  }
  return absl::OkStatus();
}

absl::StatusOr<SplitBehavior> behavior_of(const std::string& name) {
  if (name == "Removed") return SplitBehavior::kRemoved;
  if (name == "Isolated") return SplitBehavior::kIsolated;
  if (name == "MergedWithPrevious") return SplitBehavior::kMergedWithPrevious;
  if (name == "MergedWithNext") return SplitBehavior::kMergedWithNext;
  if (name == "Contiguous") return SplitBehavior::kContiguous;
  return invalid("the behavior '", name, "' of a Split is not known");
}

absl::StatusOr<SplitStep> read_split(const Json& json) {
  SplitStep step;
  PARVL_ASSIGN_OR_RETURN(std::string behavior, text_of(json, "behavior"));
  PARVL_ASSIGN_OR_RETURN(step.behavior, behavior_of(behavior));
  PARVL_ASSIGN_OR_RETURN(step.invert, json_value<bool>(json, "invert", false));
  const auto pattern = json.find("pattern");
  if (pattern == json.end() || !pattern->is_object() || pattern->size() != 1) {
    return invalid("a Split needs a pattern with either 'Regex' or 'String'");
  }
  const std::string kind = pattern->begin().key();
  PARVL_ASSIGN_OR_RETURN(std::string text, text_of(*pattern, kind));
  if (kind == "Regex") {
    PARVL_ASSIGN_OR_RETURN(step.pattern, SplitPattern::compile(text));
  } else if (kind == "String") {
    PARVL_ASSIGN_OR_RETURN(step.pattern, SplitPattern::literal(text));
  } else {
    return invalid("a Split pattern of kind '", kind, "' is not supported");
  }
  return step;
}

absl::Status read_pre_tokenizer(const Json& file, TokenizerFile& out) {
  PARVL_ASSIGN_OR_RETURN(auto steps, steps_of(file, "pre_tokenizer", "pretokenizers"));
  for (size_t i = 0; i < steps.size(); ++i) {
    const Json& step = *steps[i];
    PARVL_ASSIGN_OR_RETURN(std::string type, text_of(step, "type"));
    if (type == "Split") {
      PARVL_ASSIGN_OR_RETURN(SplitStep split, read_split(step));
      out.splits.push_back(std::move(split));
    } else if (type == "Digits") {
      PARVL_ASSIGN_OR_RETURN(bool each, json_value<bool>(step, "individual_digits", false));
      PARVL_ASSIGN_OR_RETURN(auto pattern, SplitPattern::compile(R"(\p{N})"));
      out.splits.push_back({pattern, each ? SplitBehavior::kIsolated : SplitBehavior::kContiguous, false});
    } else if (type == "ByteLevel") {
      if (i + 1 != steps.size()) return invalid("a pre_tokenizer step after ByteLevel is not supported");
      PARVL_ASSIGN_OR_RETURN(out.add_prefix_space, json_value<bool>(step, "add_prefix_space", true));
      PARVL_ASSIGN_OR_RETURN(bool use_regex, json_value<bool>(step, "use_regex", true));
      if (use_regex) {
        PARVL_ASSIGN_OR_RETURN(out.byte_level_pattern, SplitPattern::compile(kByteLevelPattern));
      }
      return absl::OkStatus();
    } else {
      return unsupported("pre_tokenizer", type);
    }
  }
  return invalid("the pre_tokenizer does not end in a ByteLevel step, so this is no byte-level BPE tokenizer");
}

absl::Status check_decoder(const Json& file) {
  PARVL_ASSIGN_OR_RETURN(auto steps, steps_of(file, "decoder", "decoders"));
  if (steps.size() != 1) return invalid("the decoder must be ByteLevel");
  PARVL_ASSIGN_OR_RETURN(std::string type, text_of(*steps[0], "type"));
  return type == "ByteLevel" ? absl::OkStatus() : unsupported("decoder", type);
}

absl::StatusOr<TokenId> id_from(const Json& value, const std::string& what) {
  if (!value.is_number_integer() || value < 0 || value >= kMaxId) {
    return invalid("the id of ", what, " must be a whole number from 0 to ", kMaxId - 1);
  }
  return value.get<TokenId>();
}

std::string named(const std::string& token) { return absl::StrCat("token '", one_line(token, 80), "'"); }

// Enters a token into the tables by id and by text.
absl::Status enter(TokenizerFile& out, TokenId id, const std::string& text, std::string bytes) {
  const auto index = static_cast<size_t>(id);
  if (index >= out.bytes.size()) out.bytes.resize(index + 1);
  if (!out.bytes[index].empty()) return invalid(named(text), " has the id ", id, ", which another token has already");
  out.bytes[index] = std::move(bytes);
  out.id_by_text[text] = id;
  return absl::OkStatus();
}

absl::Status read_vocabulary(const Json& model, TokenizerFile& out) {
  const auto vocab = model.find("vocab");
  if (vocab == model.end() || !vocab->is_object()) return invalid("'model.vocab' must be an object");
  std::fill(std::begin(out.model.of_byte), std::end(out.model.of_byte), -1);
  for (const auto& [text, value] : vocab->items()) {
    PARVL_ASSIGN_OR_RETURN(TokenId id, id_from(value, named(text)));
    std::string bytes;
    // A token outside the alphabet can come from no text; it still has a place in the tables.
    if (text.empty() || !bytes_of_spelled(text, bytes)) {
      PARVL_RETURN_IF_ERROR(enter(out, id, text, text));
      continue;
    }
    if (bytes.size() == 1) out.model.of_byte[static_cast<unsigned char>(bytes[0])] = id;
    out.model.by_bytes[bytes] = id;
    PARVL_RETURN_IF_ERROR(enter(out, id, text, std::move(bytes)));
  }
  return absl::OkStatus();
}

// The two tokens of one merge, spelled "left right" or ["left", "right"].
absl::StatusOr<std::pair<std::string, std::string>> merge_of(const Json& json, size_t rank) {
  if (json.is_array() && json.size() == 2 && json[0].is_string() && json[1].is_string()) {
    return std::pair(json[0].get<std::string>(), json[1].get<std::string>());
  }
  if (json.is_string()) {
    const auto& text = json.get_ref<const std::string&>();
    const size_t space = text.find(' ');
    if (space != std::string::npos && text.find(' ', space + 1) == std::string::npos) {
      return std::pair(text.substr(0, space), text.substr(space + 1));
    }
  }
  return invalid("merge ", rank, " must be two tokens, as \"a b\" or [\"a\", \"b\"]");
}

absl::Status read_merges(const Json& model, TokenizerFile& out) {
  const auto merges = model.find("merges");
  if (merges == model.end() || !merges->is_array()) return invalid("'model.merges' must be a list");
  uint32_t rank = 0;
  for (const Json& json : *merges) {
    PARVL_ASSIGN_OR_RETURN(auto pair, merge_of(json, rank));
    TokenId ids[3];
    const std::string texts[3] = {pair.first, pair.second, pair.first + pair.second};
    for (int i = 0; i < 3; ++i) {
      const auto it = out.id_by_text.find(texts[i]);
      if (it == out.id_by_text.end())
        return invalid("merge ", rank, ": ", named(texts[i]), " is not in the vocabulary");
      ids[i] = it->second;
    }
    out.model.merges[BpeModel::pair_key(ids[0], ids[1])] = {rank++, ids[2]};
  }
  return absl::OkStatus();
}

absl::Status read_model(const Json& file, TokenizerFile& out) {
  const auto model = file.find("model");
  if (model == file.end() || !model->is_object()) return invalid("it has no 'model'");
  // Old files leave the type out.
  PARVL_ASSIGN_OR_RETURN(std::string type, json_value<std::string>(*model, "type", "BPE"));
  if (type != "BPE") return unsupported("model", type);
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    PARVL_ASSIGN_OR_RETURN(std::string value, text_of(*model, key));
    if (!value.empty()) return invalid("'model.", key, "' is not supported");
  }
  PARVL_ASSIGN_OR_RETURN(double dropout, json_value<double>(*model, "dropout", 0.0));
  if (dropout != 0.0) return invalid("'model.dropout' is not supported");
  PARVL_ASSIGN_OR_RETURN(out.model.ignore_merges, json_value<bool>(*model, "ignore_merges", false));
  PARVL_RETURN_IF_ERROR(read_vocabulary(*model, out));
  PARVL_RETURN_IF_ERROR(read_merges(*model, out));
  // With all 256 bytes in the vocabulary nothing is ever unknown, so these two have no effect.
  const bool complete = *std::min_element(std::begin(out.model.of_byte), std::end(out.model.of_byte)) >= 0;
  PARVL_ASSIGN_OR_RETURN(bool byte_fallback, json_value<bool>(*model, "byte_fallback", false));
  PARVL_ASSIGN_OR_RETURN(std::string unknown, text_of(*model, "unk_token"));
  if (!complete && (byte_fallback || !unknown.empty())) {
    return invalid("'model.", byte_fallback ? "byte_fallback" : "unk_token",
                   "' is not supported with a vocabulary that lacks bytes");
  }
  return absl::OkStatus();
}

absl::Status read_added_tokens(const Json& file, TokenizerFile& out) {
  const auto list = file.find("added_tokens");
  if (list == file.end() || list->is_null()) return absl::OkStatus();
  if (!list->is_array()) return invalid("'added_tokens' must be a list");
  std::set<std::string> seen;
  for (const Json& json : *list) {
    if (!json.is_object() || !json.contains("id")) return invalid("an added token must be an object with an 'id'");
    AddedToken token;
    PARVL_ASSIGN_OR_RETURN(token.content, text_of(json, "content"));
    if (token.content.empty()) return invalid("an added token has no content");
    PARVL_ASSIGN_OR_RETURN(token.id, id_from(json["id"], named(token.content)));
    PARVL_ASSIGN_OR_RETURN(token.special, json_value<bool>(json, "special", false));
    PARVL_ASSIGN_OR_RETURN(token.lstrip, json_value<bool>(json, "lstrip", false));
    PARVL_ASSIGN_OR_RETURN(token.rstrip, json_value<bool>(json, "rstrip", false));
    PARVL_ASSIGN_OR_RETURN(token.normalized, json_value<bool>(json, "normalized", !token.special));
    PARVL_ASSIGN_OR_RETURN(token.single_word, json_value<bool>(json, "single_word", false));
    if (!seen.insert(token.content).second) return invalid("the added ", named(token.content), " is there twice");
    const auto known = out.id_by_text.find(token.content);
    if (known == out.id_by_text.end()) {
      PARVL_RETURN_IF_ERROR(enter(out, token.id, token.content, token.content));
    } else if (known->second != token.id) {
      return invalid("the added ", named(token.content), " has the id ", token.id, " and in the vocabulary ",
                     known->second);
    } else {
      out.bytes[static_cast<size_t>(token.id)] = token.content;
    }
    out.added.push_back(std::move(token));
  }
  return absl::OkStatus();
}

// A special token whose text the vocabulary and the merges know as well must not come from typed text that way.
void reserve_special_tokens(TokenizerFile& out) {
  std::set<TokenId> special;
  for (const AddedToken& token : out.added) {
    if (!token.special) continue;
    special.insert(token.id);
    std::string bytes;
    if (bytes_of_spelled(token.content, bytes)) out.model.by_bytes.erase(bytes);
  }
  for (auto it = out.model.merges.begin(); it != out.model.merges.end();) {
    const auto here = it++;
    if (special.contains(here->second.result)) out.model.merges.erase(here);
  }
}

// TemplateProcessing's "single" list: special tokens before and after the one sequence.
absl::Status read_template(const Json& step, TokenizerFile& out) {
  const auto single = step.find("single"), specials = step.find("special_tokens");
  if (single == step.end() || !single->is_array()) return invalid("TemplateProcessing has no 'single' list");
  bool after = false;
  for (const Json& item : *single) {
    if (item.is_object() && item.contains("Sequence")) {
      if (after) return invalid("TemplateProcessing repeats the text, which is not supported");
      after = true;
      continue;
    }
    if (!item.is_object() || !item.contains("SpecialToken") || !item["SpecialToken"].is_object()) {
      return invalid("an item of TemplateProcessing is neither 'Sequence' nor 'SpecialToken'");
    }
    PARVL_ASSIGN_OR_RETURN(std::string name, text_of(item["SpecialToken"], "id"));
    if (specials == step.end() || !specials->is_object() || !specials->contains(name) ||
        !(*specials)[name].is_object() || !(*specials)[name].contains("ids") || !(*specials)[name]["ids"].is_array()) {
      return invalid("TemplateProcessing does not say the ids of '", name, "'");
    }
    for (const Json& value : (*specials)[name]["ids"]) {
      PARVL_ASSIGN_OR_RETURN(TokenId id, id_from(value, named(name)));
      (after ? out.suffix : out.prefix).push_back(id);
    }
  }
  if (!after) return invalid("TemplateProcessing leaves out the text");
  return absl::OkStatus();
}

absl::Status read_post_processor(const Json& file, TokenizerFile& out) {
  PARVL_ASSIGN_OR_RETURN(auto steps, steps_of(file, "post_processor", "processors"));
  bool seen = false;
  for (const Json* step : steps) {
    PARVL_ASSIGN_OR_RETURN(std::string type, text_of(*step, "type"));
    if (type == "ByteLevel") continue;  // only changes reported positions
    if (type != "TemplateProcessing") return unsupported("post_processor", type);
    if (seen) return invalid("two TemplateProcessing steps are not supported");
    seen = true;
    PARVL_RETURN_IF_ERROR(read_template(*step, out));
  }
  return absl::OkStatus();
}

absl::Status check_keys(const Json& file) {
  // `truncation` and `padding` are left alone: they are the state in which the file was saved, and callers of the
  // reference implementation reset them on each call.
  static const std::set<std::string> kKnown = {"version",        "truncation", "padding",
                                               "added_tokens",   "normalizer", "pre_tokenizer",
                                               "post_processor", "decoder",    "model"};
  for (const auto& [key, ignored] : file.items()) {
    if (!kKnown.contains(key)) return invalid("the key '", key, "' is not known");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<TokenizerFile>> read_tokenizer_file(const Json& json) {
  if (!json.is_object()) return invalid("it must be a JSON object");
  auto out = std::make_unique<TokenizerFile>();
  PARVL_RETURN_IF_ERROR(check_keys(json));
  PARVL_RETURN_IF_ERROR(read_normalizer(json, *out));
  PARVL_RETURN_IF_ERROR(read_pre_tokenizer(json, *out));
  PARVL_RETURN_IF_ERROR(check_decoder(json));
  PARVL_RETURN_IF_ERROR(read_model(json, *out));
  PARVL_RETURN_IF_ERROR(read_added_tokens(json, *out));
  reserve_special_tokens(*out);
  PARVL_RETURN_IF_ERROR(read_post_processor(json, *out));
  return out;
}

}  // namespace parvl
