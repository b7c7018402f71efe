#include "parvl/media/grammar.h"

#include <xgrammar/xgrammar.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <optional>
#include <stdexcept>
#include <utility>

#include "parvl/base/check.h"
#include "parvl/base/text.h"
#include "parvl/media/grammar_limits.h"

namespace parvl {
namespace {

constexpr int64_t kUnbounded = std::numeric_limits<int64_t>::max() / 2;
constexpr int kMaxWhitespace = 20;  // in a row between two parts of JSON: a line break and its indentation
constexpr size_t kMaxMessage = 400;

struct LibraryError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct TooManySteps : std::exception {};

// What the library would print while it compiles on this thread.
thread_local std::vector<std::string>* g_warnings = nullptr;

std::string shortened(std::string text) {
  text = one_line(text);
  if (text.size() > kMaxMessage) text.resize(kMaxMessage);
  return text;
}

}  // namespace

GrammarBudget::GrammarBudget(int64_t steps) { grammar_budget::steps_left = steps; }
GrammarBudget::~GrammarBudget() { grammar_budget::steps_left = kUnbounded; }

namespace grammar_budget {
constinit thread_local int64_t steps_left = kUnbounded;
void no_steps_left() {
  steps_left = -1;  // it cannot wrap around, however often it is caught
  throw TooManySteps();
}
}  // namespace grammar_budget
}  // namespace parvl

// The library calls these two instead of printing and of throwing its own.
namespace xgrammar {
[[noreturn]] void LogFatalImpl(const std::string& file, int line, const std::string& message) {
  throw parvl::LibraryError(message);
}
void LogMessageImpl(const std::string& file, int line, int level, const std::string& message) {
  if (parvl::g_warnings != nullptr) parvl::g_warnings->push_back(message);
}
}  // namespace xgrammar

namespace parvl {

std::string grammar_source(const OrderedJson& format) {
  return OrderedJson{{"type", "structural_tag"}, {"format", format}}.dump();
}

OrderedJson json_format(const OrderedJson& schema) {
  return {{"type", "json_schema"}, {"json_schema", schema}, {"max_whitespace_cnt", kMaxWhitespace}};
}

OrderedJson any_json_object() { return {{"type", "object"}, {"additionalProperties", true}}; }

struct Grammar::Impl {
  std::string source;
  xgrammar::CompiledGrammar compiled;
  int64_t bytes = 0;
  int64_t token_steps = 0;
  bool has_end_tokens = true;
};

Grammar::Grammar(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Grammar::~Grammar() = default;
const std::string& Grammar::source() const { return impl_->source; }
int64_t Grammar::bytes() const { return impl_->bytes; }

struct GrammarCompiler::Vocabulary {
  xgrammar::TokenizerInfo tokens;
  xgrammar::GrammarCompiler compiler;
};

GrammarCompiler::GrammarCompiler(const Tokenizer& tokenizer, std::vector<TokenId> end_tokens,
                                 const GrammarLimits& limits)
    : tokenizer_(tokenizer), end_tokens_(std::move(end_tokens)), limits_(limits) {}
GrammarCompiler::~GrammarCompiler() = default;

absl::StatusOr<std::shared_ptr<const Grammar>> GrammarCompiler::compile(const std::string& source) {
  std::lock_guard compiling(compiling_);
  if (auto kept = find(source)) return kept;
  std::vector<std::string> warnings;
  std::string failure;
  std::optional<xgrammar::CompiledGrammar> compiled;
  g_warnings = &warnings;
  try {
    if (vocabulary_ == nullptr) {
      std::vector<std::string> texts;  // an empty one is never allowed
      for (TokenId id = 0; id < tokenizer_.vocab_size(); ++id) {
        texts.emplace_back(tokenizer_.is_special(id) ? std::string_view() : tokenizer_.token_bytes(id));
      }
      const xgrammar::TokenizerInfo tokens(texts, xgrammar::VocabType::RAW, std::nullopt, end_tokens_);
      vocabulary_ = std::make_unique<Vocabulary>(
          Vocabulary{tokens, xgrammar::GrammarCompiler(tokens, /*max_threads=*/1, /*cache_enabled=*/false)});
    }
    const GrammarBudget budget(limits_.compile_steps);
    compiled = vocabulary_->compiler.CompileStructuralTag(source);
  } catch (const TooManySteps&) {
    failure = absl::StrCat("compiling it takes more than the limit of ", limits_.compile_steps,
                           " steps; use a smaller schema, with shorter lists and fewer repetitions");
  } catch (const std::exception& e) {
    failure = shortened(e.what());
  }
  g_warnings = nullptr;
  if (failure.empty() && !warnings.empty()) {  // all of them say what would not be kept to
    failure = shortened(warnings.front().substr(0, warnings.front().find("; ")));
  }
  if (!failure.empty()) return invalid(failure);
  const auto bytes = static_cast<int64_t>(compiled->MemorySizeBytes() + source.size());
  if (bytes > limits_.grammar_bytes) {
    return invalid("compiled, it takes ", bytes >> 20, " MiB, over the limit of ", limits_.grammar_bytes >> 20,
                   " MiB; use a smaller schema");
  }
  std::shared_ptr<const Grammar> made(new Grammar(std::make_unique<Grammar::Impl>(
      Grammar::Impl{source, *compiled, bytes, limits_.token_steps, !end_tokens_.empty()})));
  std::lock_guard lock(mutex_);
  kept_.push_front(made);
  by_source_[source] = kept_.begin();
  bytes_ += bytes;
  while (bytes_ > limits_.cache_bytes) {
    bytes_ -= kept_.back()->bytes();
    by_source_.erase(kept_.back()->source());
    kept_.pop_back();
  }
  return made;
}

std::shared_ptr<const Grammar> GrammarCompiler::find(const std::string& source) {
  std::lock_guard lock(mutex_);
  const auto found = by_source_.find(source);
  if (found == by_source_.end()) return nullptr;
  kept_.splice(kept_.begin(), kept_, found->second);
  return kept_.front();
}

int64_t GrammarCompiler::cached_bytes() const {
  std::lock_guard lock(mutex_);
  return bytes_;
}

struct GrammarMatcher::Impl {
  std::shared_ptr<const Grammar> grammar;
  xgrammar::GrammarMatcher matcher;

  // What one token asks of the library, within the limits.
  absl::Status within_limits(const std::function<void()>& work) const {
    const int64_t limit = grammar->impl_->token_steps;
    try {
      const GrammarBudget budget(limit);
      work();
      return absl::OkStatus();
    } catch (const TooManySteps&) {
      return invalid("following the grammar takes more than the limit of ", limit,
                     " steps a token; use a schema with fewer alternatives that begin alike");
    } catch (const std::exception& e) {
      return failed("following the grammar failed: ", shortened(e.what()));
    }
  }
};

GrammarMatcher::GrammarMatcher(std::shared_ptr<const Grammar> grammar) {
  xgrammar::GrammarMatcher matcher(grammar->impl_->compiled, std::nullopt,
                                   /*terminate_without_stop_token=*/!grammar->impl_->has_end_tokens);
  impl_ = std::make_unique<Impl>(Impl{std::move(grammar), std::move(matcher)});
}
GrammarMatcher::~GrammarMatcher() = default;
GrammarMatcher::GrammarMatcher(GrammarMatcher&&) noexcept = default;
GrammarMatcher& GrammarMatcher::operator=(GrammarMatcher&&) noexcept = default;

absl::Status GrammarMatcher::fill(std::vector<uint32_t>& mask) {
  PARVL_CHECK(!ended(), "a mask after the end of the grammar");
  const int vocab = impl_->grammar->impl_->compiled.GetTokenizerInfo().GetVocabSize();
  int64_t words = xgrammar::GetBitmaskSize(vocab);
  mask.assign(static_cast<size_t>(words), ~uint32_t{0});
  DLTensor tensor{mask.data(), DLDevice{kDLCPU, 0}, 1, xgrammar::GetBitmaskDLType(), &words, nullptr, 0};
  PARVL_RETURN_IF_ERROR(impl_->within_limits([&] { impl_->matcher.FillNextTokenBitmask(&tensor); }));
  if (vocab % 32 != 0) mask.back() &= (uint32_t{1} << (vocab % 32)) - 1;
  if (std::any_of(mask.begin(), mask.end(), [](uint32_t word) { return word != 0; })) return absl::OkStatus();
  return invalid("no token of this model's vocabulary can go on with the grammar; use another schema");
}

absl::Status GrammarMatcher::accept(TokenId token) {
  bool accepted = false;
  PARVL_RETURN_IF_ERROR(impl_->within_limits([&] { accepted = impl_->matcher.AcceptToken(token); }));
  return accepted ? absl::OkStatus() : failed("the token ", token, " does not go on with the grammar");
}

bool GrammarMatcher::ended() const { return impl_->matcher.IsTerminated(); }

}  // namespace parvl
