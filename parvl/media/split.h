// Cutting text into words before BPE: the Split and ByteLevel steps of a tokenizer.json, with PCRE2 for the patterns.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "parvl/base/status.h"

namespace parvl {

struct TextRange {
  size_t begin = 0;
  size_t end = 0;
};

// A regular expression as the `tokenizers` library understands it (Oniguruma, Ruby's dialect, UTF-8). Immutable;
// thread-safe.
class SplitPattern {
 public:
  // InvalidArgument for what does not mean the same in PCRE2 (named) or does not compile.
  static absl::StatusOr<std::shared_ptr<const SplitPattern>> compile(std::string_view pattern);
  // A pattern that matches exactly `text`.
  static absl::StatusOr<std::shared_ptr<const SplitPattern>> literal(std::string_view text);
  ~SplitPattern();

  // All matches that are not empty, left to right, not overlapping. `text` must be valid UTF-8.
  std::vector<TextRange> find_all(std::string_view text) const;

 private:
  struct Compiled;
  explicit SplitPattern(std::unique_ptr<Compiled> compiled);
  static absl::StatusOr<std::shared_ptr<const SplitPattern>> compile_translated(const std::string& pattern);
  std::unique_ptr<Compiled> compiled_;
};

enum class SplitBehavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };

struct SplitStep {
  std::shared_ptr<const SplitPattern> pattern;
  SplitBehavior behavior = SplitBehavior::kIsolated;
  bool invert = false;  // matches and gaps change places
};

// The parts of `text` that one step makes, as ranges of it; never empty ones.
std::vector<TextRange> split_text(std::string_view text, const SplitStep& step);

}  // namespace parvl
