// Grammars that an answer must follow: compiled over a tokenizer's vocabulary, and followed token by token. Hides
// xgrammar, whose headers only grammar.cc includes.
#pragma once

#include <absl/types/span.h>

#include <cstdint>
#include <limits>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "parvl/base/ordered_json.h"
#include "parvl/base/status.h"
#include "parvl/media/tokenizer.h"

namespace parvl {

// A grammar's source is a text that means the same in every process: a structural tag in JSON, as xgrammar calls it,
// whose `format` says what an answer reads like.
std::string grammar_source(const OrderedJson& format);
// The format of the JSON values that `schema` (supported_schema's) allows.
OrderedJson json_format(const OrderedJson& schema);
// The schema of any JSON object.
OrderedJson any_json_object();

struct GrammarLimits {
  size_t source_bytes = size_t{512} << 10;
  // A step: see grammar_limits.h. The worst take 0.07 µs each on one core: 7 s to compile, 0.3 s for a token.
  int64_t compile_steps = 100'000'000;
  int64_t token_steps = 4'000'000;            // of all sequences of a generation step together
  int64_t grammar_bytes = int64_t{64} << 20;  // of one compiled grammar
  int64_t cache_bytes = int64_t{256} << 20;   // of what is kept for requests to come
};

// A compiled grammar. Immutable, thread-safe.
class Grammar {
 public:
  ~Grammar();
  const std::string& source() const;
  int64_t bytes() const;

 private:
  friend class GrammarCompiler;
  friend class GrammarMatcher;
  struct Impl;
  explicit Grammar(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Compiles for one tokenizer, and keeps what it compiled or refused, the least recently used going first. Thread-safe.
class GrammarCompiler {
 public:
  using Result = absl::StatusOr<std::shared_ptr<const Grammar>>;

  // `tokenizer` must outlive it. `end_tokens`: of which one ends an answer; a grammar's text never holds them, nor any
  // other special token.
  GrammarCompiler(const Tokenizer& tokenizer, std::vector<TokenId> end_tokens, const GrammarLimits& limits = {});
  ~GrammarCompiler();

  // Milliseconds to many seconds, bounded by the limits; one compilation at a time. InvalidArgument in one sentence for
  // a source that is wrong, too large, or that the compiler would not keep to in full; Cancelled soon after `stop` is
  // asked for.
  Result compile(const std::string& source, const std::stop_token& stop = {});
  // What compile() would say at once, since it is kept.
  std::optional<Result> find(const std::string& source);
  int64_t cached_bytes() const;

 private:
  struct Vocabulary;
  struct Kept {
    std::string source;
    Result result;
    int64_t bytes = 0;
  };
  void make_vocabulary();
  Result compile_new(const std::string& source, const std::stop_token& stop);
  void keep(const std::string& source, const Result& result);

  const Tokenizer& tokenizer_;
  const std::vector<TokenId> end_tokens_;
  const GrammarLimits limits_;
  std::mutex compiling_;
  std::unique_ptr<Vocabulary> vocabulary_;  // made at the first compilation, which holds compiling_
  mutable std::mutex mutex_;
  std::list<Kept> kept_;                                                       // the most recently used first
  std::unordered_map<std::string_view, std::list<Kept>::iterator> by_source_;  // the texts are those of kept_
  int64_t bytes_ = 0;                                                          // of kept_
};

// One answer's place in a grammar, a function of the grammar and the accepted tokens alone. Not thread-safe.
class GrammarMatcher {
 public:
  static constexpr int64_t kNoBound = std::numeric_limits<int64_t>::max();

  explicit GrammarMatcher(std::shared_ptr<const Grammar> grammar);
  ~GrammarMatcher();
  GrammarMatcher(GrammarMatcher&&) noexcept;
  GrammarMatcher& operator=(GrammarMatcher&&) noexcept;

  // A bit a token, the lowest bit of the first word for token 0: what may come next. An end token may come only where
  // the text is complete; where nothing else may come, only end tokens may. Not after ended(). InvalidArgument when
  // finding out takes more than `steps`, or than the limits allow; `token_steps` is that bound of the accept after it.
  absl::Status fill(std::vector<uint32_t>& mask, int64_t steps = kNoBound, int64_t token_steps = kNoBound);
  // What the last fill and what was accepted after it took; kNoBound before the first.
  int64_t last_steps() const;
  int64_t token_steps() const;  // of the limits
  // The next token; Internal when it may not come.
  absl::Status accept(TokenId token);
  // Whether an end token came, or nothing may come any more.
  bool ended() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// A sequence of a generation step, and what may come next in it.
struct MaskJob {
  GrammarMatcher* matcher;
  std::vector<uint32_t>* mask;
  absl::Status* status;
};

// Fills the masks of one generation step, all of them together within token_steps of the limits, and bounds the tokens
// that are then accepted alike. What took least in the step before goes first, what is new last, and each may take what
// is left but for a reserve for those after it: a grammar that is hard to follow costs its own request.
void fill_masks(std::vector<MaskJob> jobs);

}  // namespace parvl
