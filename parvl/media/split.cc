#include "parvl/media/split.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <utility>

#include "parvl/media/unicode.h"

namespace parvl {
namespace {

constexpr size_t kMaxPatternBytes = 64 << 10;
// Bounds the time of one match. The patterns of real tokenizers need a few steps a character.
constexpr uint32_t kMatchLimit = 20'000'000;
constexpr uint32_t kHeapLimitKiB = 256 << 10;

// Rewrites Ruby's regular expressions into PCRE2's where the two differ in meaning, and refuses what it does not know.
class Translator {
 public:
  explicit Translator(std::string_view pattern) : in_(pattern) {}

  absl::StatusOr<std::string> run() {
    while (at_ < in_.size()) PARVL_RETURN_IF_ERROR(step());
    return std::move(out_);
  }

 private:
  absl::Status step() {
    const char c = in_[at_];
    if (c == '\\') return escape();
    if (in_class_) return class_character(c);
    if (c == '[') {
      in_class_ = true;
      copy(1);
      if (at_ < in_.size() && in_[at_] == '^') copy(1);
      return absl::OkStatus();
    }
    if (in_.substr(at_, 2) == "(*") return invalid("'(*' at byte ", at_, " is not supported");
    if (in_.substr(at_, 2) == "(?") {
      const std::string_view rest = in_.substr(at_ + 2);
      const bool known = !rest.empty() && (std::string_view(":=!>i").find(rest[0]) != std::string_view::npos ||
                                           rest.substr(0, 2) == "<=" || rest.substr(0, 2) == "<!");
      if (!known)
        return invalid("the group '", std::string(in_.substr(at_, 4)), "' at byte ", at_, " is not supported");
    }
    // Ruby reads "{1,3}+" as a repetition of a repetition, PCRE2 as a possessive one.
    if (c == '}' && at_ + 1 < in_.size() && in_[at_ + 1] == '+')
      return invalid("'}+' at byte ", at_, " is not supported");
    copy(1);
    return absl::OkStatus();
  }

  absl::Status class_character(char c) {
    if (c == '[') return invalid("a '[' within a class, at byte ", at_, ", is not supported");
    if (in_.substr(at_, 2) == "&&") return invalid("'&&' within a class, at byte ", at_, ", is not supported");
    if (c == ']') in_class_ = false;
    copy(1);
    return absl::OkStatus();
  }

  absl::Status escape() {
    if (at_ + 1 >= in_.size()) return invalid("it ends in a backslash");
    const char c = in_[at_ + 1];
    const auto replace = [&](std::string_view inside, bool negated) -> absl::Status {
      if (in_class_ && negated) return invalid("'\\", std::string(1, c), "' within a class is not supported");
      out_ += in_class_ ? std::string(inside) : (negated ? "[^" : "[") + std::string(inside) + "]";
      at_ += 2;
      return absl::OkStatus();
    };
    switch (c) {
      // PCRE2's own \s has U+180E too, and its \w has no marks.
      case 's':
      case 'S':
        return replace(R"(\p{Z}\t-\r\x{85})", c == 'S');
      case 'w':
      case 'W':
        return replace(R"(\p{L}\p{M}\p{Nd}\p{Pc})", c == 'W');
      case 'v':
        return replace(R"(\x0b)", false);
      case 'p':
      case 'P':
        return property();
      case 'd':
      case 'D':
      case 'r':
      case 'n':
      case 't':
      case 'f':
      case 'x':
        copy(2);
        return absl::OkStatus();
      default:
        break;
    }
    const bool letter_or_digit = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
    if (letter_or_digit) return invalid("'\\", std::string(1, c), "' at byte ", at_, " is not supported");
    copy(2);  // the next bytes of a longer character follow by themselves
    return absl::OkStatus();
  }

  absl::Status property() {
    const size_t close = in_.find('}', at_);
    if (in_.substr(at_ + 2, 1) != "{" || close == std::string_view::npos) {
      return invalid("'", std::string(in_.substr(at_, 2)), "' at byte ", at_, " must be followed by a name in braces");
    }
    std::string_view name = in_.substr(at_ + 3, close - at_ - 3);
    const bool negated = !name.empty() && name[0] == '^';
    if (negated) name.remove_prefix(1);
    // A long name is a script; PCRE2 would add the characters that a script shares with others.
    out_ += '\\';
    out_ += in_.substr(at_ + 1, 2);
    if (negated) out_ += '^';
    if (name.size() > 2) out_ += "sc:";
    out_ += name;
    out_ += '}';
    at_ = close + 1;
    return absl::OkStatus();
  }

  void copy(size_t count) {
    out_ += in_.substr(at_, count);
    at_ += count;
  }

  std::string_view in_;
  std::string out_;
  size_t at_ = 0;
  bool in_class_ = false;
};

template <typename T, void (*Free)(T*)>
struct Freer {
  void operator()(T* p) const { Free(p); }
};
using MatchData = std::unique_ptr<pcre2_match_data, Freer<pcre2_match_data, pcre2_match_data_free>>;
using MatchContext = std::unique_ptr<pcre2_match_context, Freer<pcre2_match_context, pcre2_match_context_free>>;
using CompileContext = std::unique_ptr<pcre2_compile_context, Freer<pcre2_compile_context, pcre2_compile_context_free>>;
using Code = std::unique_ptr<pcre2_code, Freer<pcre2_code, pcre2_code_free>>;

struct Part {
  TextRange range;
  bool is_match = false;
};

std::vector<Part> parts_of(std::string_view text, const SplitStep& step) {
  std::vector<Part> parts;
  size_t at = 0;
  for (const TextRange& match : step.pattern->find_all(text)) {
    if (match.begin > at) parts.push_back({{at, match.begin}, step.invert});
    parts.push_back({match, !step.invert});
    at = match.end;
  }
  if (at < text.size()) parts.push_back({{at, text.size()}, step.invert});
  return parts;
}

}  // namespace

struct SplitPattern::Compiled {
  Code code;
  MatchContext context;
};

SplitPattern::SplitPattern(std::unique_ptr<Compiled> compiled) : compiled_(std::move(compiled)) {}
SplitPattern::~SplitPattern() = default;

absl::StatusOr<std::shared_ptr<const SplitPattern>> SplitPattern::compile_translated(const std::string& pattern) {
  auto compiled = std::make_unique<Compiled>();
  CompileContext context(pcre2_compile_context_create(nullptr));
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE where = 0;
  // Ruby's ^ and $ always mean lines.
  constexpr uint32_t kOptions =
      PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C | PCRE2_NO_AUTO_CAPTURE;
  compiled->code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(), kOptions, &error,
                                     &where, context.get()));
  if (compiled->code == nullptr) {
    PCRE2_UCHAR message[200] = {};
    pcre2_get_error_message(error, message, sizeof(message));
    return invalid("regular expression: ", reinterpret_cast<const char*>(message));
  }
  pcre2_jit_compile(compiled->code.get(), PCRE2_JIT_COMPLETE);  // without it, matching is slower but the same
  compiled->context.reset(pcre2_match_context_create(nullptr));
  pcre2_set_match_limit(compiled->context.get(), kMatchLimit);
  pcre2_set_heap_limit(compiled->context.get(), kHeapLimitKiB);
  return std::shared_ptr<const SplitPattern>(new SplitPattern(std::move(compiled)));
}

absl::StatusOr<std::shared_ptr<const SplitPattern>> SplitPattern::compile(std::string_view pattern) {
  if (pattern.size() > kMaxPatternBytes) return invalid("regular expression of ", pattern.size(), " bytes is too long");
  auto translated = Translator(pattern).run();
  if (!translated.ok()) return with_context(translated.status(), "regular expression");
  return compile_translated(*translated);
}

absl::StatusOr<std::shared_ptr<const SplitPattern>> SplitPattern::literal(std::string_view text) {
  if (text.empty()) return invalid("the pattern is empty");
  if (text.find("\\E") != std::string_view::npos) return invalid("a literal pattern with '\\E' is not supported");
  return compile_translated("\\Q" + std::string(text) + "\\E");
}

std::vector<TextRange> SplitPattern::find_all(std::string_view text) const {
  std::vector<TextRange> found;
  const MatchData data(pcre2_match_data_create(1, nullptr));
  const pcre2_code* code = compiled_->code.get();
  const auto match = [&](size_t at, uint32_t options) {
    return pcre2_match(code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), at, options, data.get(),
                       compiled_->context.get());
  };
  for (size_t at = 0; at < text.size();) {
    int result = match(at, PCRE2_NO_UTF_CHECK);
    // The compiled code has a small stack of its own; the interpreter takes over where that is not enough.
    if (result == PCRE2_ERROR_JIT_STACKLIMIT) result = match(at, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT);
    // Nothing more, or given up at a limit, as it would be again at the next place.
    if (result < 0) break;
    const PCRE2_SIZE* ends = pcre2_get_ovector_pointer(data.get());
    const bool usable = ends[1] > ends[0] && ends[0] >= at;
    if (usable) {
      found.push_back({ends[0], ends[1]});
      at = ends[1];
      continue;
    }
    const size_t from = std::max(at, static_cast<size_t>(ends[0]));  // an empty match: go on one character later
    at = from < text.size() ? from + utf8_step(text, from).length : text.size();
  }
  return found;
}

std::vector<TextRange> split_text(std::string_view text, const SplitStep& step) {
  std::vector<Part> parts = parts_of(text, step);
  std::vector<TextRange> out;
  const bool backwards = step.behavior == SplitBehavior::kMergedWithNext;
  if (backwards) std::reverse(parts.begin(), parts.end());
  bool previous_match = false;
  for (const Part& part : parts) {
    bool joins = false;
    switch (step.behavior) {
      case SplitBehavior::kRemoved:
        if (part.is_match) continue;
        break;
      case SplitBehavior::kIsolated:
        break;
      case SplitBehavior::kMergedWithPrevious:
      case SplitBehavior::kMergedWithNext:
        joins = part.is_match && !previous_match;
        break;
      case SplitBehavior::kContiguous:
        joins = part.is_match == previous_match;
        break;
    }
    previous_match = part.is_match;
    if (joins && !out.empty()) {
      out.back().begin = std::min(out.back().begin, part.range.begin);
      out.back().end = std::max(out.back().end, part.range.end);
    } else {
      out.push_back(part.range);
    }
  }
  if (backwards) std::reverse(out.begin(), out.end());
  return out;
}

}  // namespace parvl
