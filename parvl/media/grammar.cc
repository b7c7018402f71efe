#include "parvl/media/grammar.h"

#include <xgrammar/xgrammar.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <new>
#include <optional>
#include <stdexcept>
#include <utility>

#include "parvl/base/check.h"
#include "parvl/base/text.h"
#include "parvl/media/grammar_limits.h"
#include "parvl/media/json_schema.h"

namespace parvl {
namespace {

constexpr int64_t kUnbounded = std::numeric_limits<int64_t>::max() / 2;
constexpr int kMaxWhitespace = 20;  // in a row between two parts of JSON: a line break and its indentation
constexpr size_t kMaxMessage = 400;

struct LibraryError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct TooManySteps : std::exception {};
struct Stopped : std::exception {};

constexpr int64_t kNoBound = GrammarMatcher::kNoBound;
constexpr int64_t kSlice = 1 << 16;  // steps between two looks at the stop

// Of this thread's budget: what steps_left does not hold yet.
constinit thread_local int64_t g_steps_beyond = 0;
thread_local std::stop_token g_stop;

// What the library would print while it compiles on this thread.
thread_local std::vector<std::string>* g_warnings = nullptr;

class Listening {
 public:
  explicit Listening(std::vector<std::string>& warnings) { g_warnings = &warnings; }
  ~Listening() { g_warnings = nullptr; }
  Listening(const Listening&) = delete;
  Listening& operator=(const Listening&) = delete;
};

std::string shortened(std::string text) {
  text = one_line(text);
  if (text.size() > kMaxMessage) text.resize(kMaxMessage);
  return text;
}

}  // namespace

GrammarBudget::GrammarBudget(int64_t steps, std::stop_token stop) : steps_(steps) {
  grammar_budget::steps_left = 0;
  g_steps_beyond = steps;
  g_stop = std::move(stop);
}
GrammarBudget::~GrammarBudget() {
  grammar_budget::steps_left = kUnbounded;
  g_steps_beyond = 0;
  g_stop = {};
}
int64_t GrammarBudget::spent() const {
  return steps_ - g_steps_beyond - std::max<int64_t>(grammar_budget::steps_left, 0);
}

namespace grammar_budget {
constinit thread_local int64_t steps_left = kUnbounded;
void more_steps() {
  const int64_t owed = -steps_left;
  steps_left = -1;  // where it throws it does so again, and cannot wrap around, however often that is caught
  if (g_stop.stop_requested()) throw Stopped();
  if (owed > g_steps_beyond) {
    g_steps_beyond = 0;
    throw TooManySteps();
  }
  g_steps_beyond -= owed;
  steps_left = std::min(kSlice, g_steps_beyond);
  g_steps_beyond -= steps_left;
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
  int64_t token_steps = 0;  // GrammarLimits'
  bool has_end_tokens = true;
};

Grammar::Grammar(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Grammar::~Grammar() = default;
const std::string& Grammar::source() const { return impl_->source; }
int64_t Grammar::bytes() const { return impl_->bytes; }

struct GrammarCompiler::Vocabulary {
  xgrammar::TokenizerInfo tokens;
  xgrammar::GrammarCompiler compiler;

  struct Compiled {
    std::optional<xgrammar::CompiledGrammar> grammar;
    std::string failure;  // empty when there is none
  };
  // Against this thread's budget; throws Stopped, TooManySteps and bad_alloc.
  Compiled compile(const std::string& source);
  std::string failing_part(const OrderedJson& format);
};

GrammarCompiler::Vocabulary::Compiled GrammarCompiler::Vocabulary::compile(const std::string& source) {
  std::vector<std::string> warnings;
  Compiled out;
  try {
    const Listening listening(warnings);
    out.grammar = compiler.CompileStructuralTag(source);
  } catch (const Stopped&) {
    throw;
  } catch (const TooManySteps&) {
    throw;
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& e) {
    out.failure = shortened(e.what());
  }
  if (out.failure.empty() && !warnings.empty()) {  // all of them say what would not be kept to
    out.failure = shortened(warnings.front().substr(0, warnings.front().find("; ")));
  }
  return out;
}

// For a format that fails: the library does not say where, so each schema in it is tried by itself, the inner ones
// first. "at '#/pointer': its failure"; "" when none fails alone or the search takes too long.
std::string GrammarCompiler::Vocabulary::failing_part(const OrderedJson& format) {
  std::vector<const OrderedJson*> roots;
  const std::function<void(const OrderedJson&)> collect = [&](const OrderedJson& value) {
    if (value.is_object() && value.contains("json_schema")) return roots.push_back(&value["json_schema"]);
    for (const OrderedJson& inner : value) {
      if (inner.is_structured()) collect(inner);
    }
  };
  collect(format);
  try {
    for (size_t root = 0; root < roots.size(); ++root) {
      for (const auto& [pointer, schema] : inner_schemas(*roots[root])) {
        const std::string failure = compile(grammar_source(json_format(*schema))).failure;
        if (failure.empty()) continue;
        const std::string which = roots.size() > 1 ? absl::StrCat("schema ", root + 1, " of ", roots.size(), " ") : "";
        return absl::StrCat(which, "at ", excerpt("#" + pointer, 120), ": ", failure);
      }
    }
  } catch (const TooManySteps&) {
  }
  return "";
}

GrammarCompiler::GrammarCompiler(const Tokenizer& tokenizer, std::vector<TokenId> end_tokens,
                                 const GrammarLimits& limits)
    : tokenizer_(tokenizer), end_tokens_(std::move(end_tokens)), limits_(limits) {}
GrammarCompiler::~GrammarCompiler() = default;

void GrammarCompiler::make_vocabulary() {
  if (vocabulary_ != nullptr) return;
  std::vector<std::string> texts;  // an empty one is never allowed
  for (TokenId id = 0; id < tokenizer_.vocab_size(); ++id) {
    texts.emplace_back(tokenizer_.is_special(id) ? std::string_view() : tokenizer_.token_bytes(id));
  }
  const xgrammar::TokenizerInfo tokens(texts, xgrammar::VocabType::RAW, std::nullopt, end_tokens_);
  vocabulary_ = std::make_unique<Vocabulary>(
      Vocabulary{tokens, xgrammar::GrammarCompiler(tokens, /*max_threads=*/1, /*cache_enabled=*/false)});
}

GrammarCompiler::Result GrammarCompiler::compile(const std::string& source, const std::stop_token& stop) {
  if (source.size() > limits_.source_bytes) {  // the library takes hundreds of bytes for each before it counts a step
    return invalid("as a grammar it has ", source.size(), " bytes, over the limit of ", limits_.source_bytes);
  }
  std::lock_guard compiling(compiling_);
  if (auto kept = find(source)) return *std::move(kept);
  if (stop.stop_requested()) return absl::CancelledError("the grammar is not wanted any more");
  Result result = compile_new(source, stop);
  if (result.ok() || absl::IsInvalidArgument(result.status())) keep(source, result);
  return result;
}

GrammarCompiler::Result GrammarCompiler::compile_new(const std::string& source, const std::stop_token& stop) {
  std::string failure;
  std::optional<xgrammar::CompiledGrammar> compiled;
  try {
    make_vocabulary();
    const GrammarBudget budget(limits_.compile_steps, stop);
    Vocabulary::Compiled made = vocabulary_->compile(source);
    compiled = std::move(made.grammar);
    failure = std::move(made.failure);
    if (!failure.empty()) {
      const std::string place = vocabulary_->failing_part(OrderedJson::parse(source)["format"]);
      if (!place.empty()) failure = place;
    }
  } catch (const Stopped&) {
    return absl::CancelledError("the grammar is not wanted any more");
  } catch (const std::bad_alloc&) {
    return failed("there is not enough memory to compile a grammar");
  } catch (const TooManySteps&) {
    failure = absl::StrCat("compiling it takes more than the limit of ", limits_.compile_steps,
                           " steps; use a smaller schema, with shorter lists and fewer repetitions");
  }
  if (!failure.empty()) return invalid(failure);
  const auto bytes = static_cast<int64_t>(compiled->MemorySizeBytes() + source.size());
  if (bytes > limits_.grammar_bytes) {
    return invalid("compiled, it takes ", bytes >> 20, " MiB, over the limit of ", limits_.grammar_bytes >> 20,
                   " MiB; use a smaller schema");
  }
  return std::shared_ptr<const Grammar>(new Grammar(std::make_unique<Grammar::Impl>(
      Grammar::Impl{source, *compiled, bytes, limits_.token_steps, !end_tokens_.empty()})));
}

void GrammarCompiler::keep(const std::string& source, const Result& result) {
  std::lock_guard lock(mutex_);
  const int64_t own = static_cast<int64_t>(source.size() + sizeof(Kept));
  const int64_t bytes =
      own + (result.ok() ? (*result)->bytes() : static_cast<int64_t>(result.status().message().size()));
  kept_.push_front({source, result, bytes});
  by_source_[kept_.front().source] = kept_.begin();
  bytes_ += bytes;
  while (bytes_ > limits_.cache_bytes) {
    bytes_ -= kept_.back().bytes;
    by_source_.erase(kept_.back().source);
    kept_.pop_back();
  }
}

std::optional<GrammarCompiler::Result> GrammarCompiler::find(const std::string& source) {
  std::lock_guard lock(mutex_);
  const auto found = by_source_.find(source);
  if (found == by_source_.end()) return std::nullopt;
  kept_.splice(kept_.begin(), kept_, found->second);
  return kept_.front().result;
}

int64_t GrammarCompiler::cached_bytes() const {
  std::lock_guard lock(mutex_);
  return bytes_;
}

struct GrammarMatcher::Impl {
  std::shared_ptr<const Grammar> grammar;
  xgrammar::GrammarMatcher matcher;
  int64_t accept_limit = 0;
  int64_t last_steps = kNoBound;

  // What one token asks of the library, within `limit`.
  absl::Status within(int64_t limit, const std::function<void()>& work) {
    const GrammarBudget budget(limit);
    const absl::Status status = guarded(limit, work);
    if (last_steps != kNoBound) last_steps += budget.spent();
    return status;
  }
  static absl::Status guarded(int64_t limit, const std::function<void()>& work) {
    try {
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
  const int64_t limit = grammar->impl_->token_steps;
  impl_ = std::make_unique<Impl>(Impl{std::move(grammar), std::move(matcher), limit});
}
GrammarMatcher::~GrammarMatcher() = default;
GrammarMatcher::GrammarMatcher(GrammarMatcher&&) noexcept = default;
GrammarMatcher& GrammarMatcher::operator=(GrammarMatcher&&) noexcept = default;

absl::Status GrammarMatcher::fill(std::vector<uint32_t>& mask, int64_t steps, int64_t token_steps) {
  PARVL_CHECK(!ended(), "a mask after the end of the grammar");
  const int64_t most = this->token_steps();
  impl_->accept_limit = std::min(token_steps, most);
  impl_->last_steps = 0;
  const int vocab = impl_->grammar->impl_->compiled.GetTokenizerInfo().GetVocabSize();
  int64_t words = xgrammar::GetBitmaskSize(vocab);
  mask.assign(static_cast<size_t>(words), ~uint32_t{0});
  DLTensor tensor{mask.data(), DLDevice{kDLCPU, 0}, 1, xgrammar::GetBitmaskDLType(), &words, nullptr, 0};
  PARVL_RETURN_IF_ERROR(impl_->within(std::min(steps, most), [&] { impl_->matcher.FillNextTokenBitmask(&tensor); }));
  if (vocab % 32 != 0) mask.back() &= (uint32_t{1} << (vocab % 32)) - 1;
  if (std::any_of(mask.begin(), mask.end(), [](uint32_t word) { return word != 0; })) return absl::OkStatus();
  return invalid("no token of this model's vocabulary can go on with the grammar; use another schema");
}

absl::Status GrammarMatcher::accept(TokenId token) {
  bool accepted = false;
  PARVL_RETURN_IF_ERROR(impl_->within(impl_->accept_limit, [&] { accepted = impl_->matcher.AcceptToken(token); }));
  return accepted ? absl::OkStatus() : failed("the token ", token, " does not go on with the grammar");
}

bool GrammarMatcher::ended() const { return impl_->matcher.IsTerminated(); }
int64_t GrammarMatcher::last_steps() const { return impl_->last_steps; }
int64_t GrammarMatcher::token_steps() const { return impl_->grammar->impl_->token_steps; }

void fill_masks(std::vector<MaskJob> jobs) {
  if (jobs.empty()) return;
  std::stable_sort(jobs.begin(), jobs.end(), [](const MaskJob& a, const MaskJob& b) {
    return a.matcher->last_steps() < b.matcher->last_steps();
  });
  const auto count = static_cast<int64_t>(jobs.size());
  int64_t left = jobs.front().matcher->token_steps(), after = count - 1;
  const int64_t share = left / count, reserve = share / 2;
  for (const MaskJob& job : jobs) {
    *job.status = job.matcher->fill(*job.mask, left - reserve * after--, share);
    left -= job.matcher->last_steps();
  }
}

}  // namespace parvl
