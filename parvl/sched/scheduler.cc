#include "parvl/sched/scheduler.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "parvl/base/check.h"

namespace parvl {
namespace {

constexpr int64_t kMaxBlocks = int64_t{1} << 24, kMaxBlockSize = int64_t{1} << 16;
constexpr int64_t kMaxEncoderBytes = int64_t{1} << 50;
constexpr int64_t kLeastPart = 8;  // of a step's tokens for a prompt: fewer are hardly worth its turn

void insert_in_order(std::vector<Sequence*>& line, Sequence& sequence) {
  const auto before = [](const Sequence* a, const Sequence* b) { return goes_before(*a, *b); };
  line.insert(std::upper_bound(line.begin(), line.end(), &sequence, before), &sequence);
}

}  // namespace

absl::Status validate(const SchedulerConfig& c) {
  const auto positive = [](const char* name, int64_t value) {
    return value > 0 ? absl::OkStatus() : invalid(name, " is ", value, "; it must be at least 1");
  };
  PARVL_RETURN_IF_ERROR(positive("the KV block size", c.block_size));
  PARVL_RETURN_IF_ERROR(positive("the number of KV blocks", c.num_blocks));
  PARVL_RETURN_IF_ERROR(positive("--max-model-len", c.max_model_len));
  PARVL_RETURN_IF_ERROR(positive("--max-num-seqs", c.max_seqs));
  PARVL_RETURN_IF_ERROR(positive("--max-num-batched-tokens", c.max_batched_tokens));
  if (c.num_blocks > kMaxBlocks || c.block_size > kMaxBlockSize) {
    return invalid(c.num_blocks, " KV blocks of ", c.block_size, " tokens are more than ", kMaxBlocks, " of ",
                   kMaxBlockSize, "; give the KV memory fewer bytes");
  }
  if (*std::min_element(c.encode_budget.begin(), c.encode_budget.end()) < 0 || c.encoder_cache_bytes < 0 ||
      c.encoder_cache_bytes > kMaxEncoderBytes) {
    return invalid("an encoding budget, or --encoder-cache-bytes ", c.encoder_cache_bytes,
                   ", is negative or beyond all memory");
  }
  if (c.max_batched_tokens < c.max_seqs) {
    return invalid("--max-num-batched-tokens ", c.max_batched_tokens, " is less than --max-num-seqs ", c.max_seqs,
                   ", so not every running sequence could go on");
  }
  if (!(c.step_s >= 0 && std::isfinite(c.step_s))) return invalid("a step's time is ", c.step_s, " seconds");
  if (c.num_blocks * c.block_size < c.max_model_len) {
    return invalid("the KV memory holds ", c.num_blocks * c.block_size, " tokens, fewer than --max-model-len ",
                   c.max_model_len, "; give it more memory, or lower --max-model-len");
  }
  return absl::OkStatus();
}

absl::Status validate(const SchedRequest& request) {
  const int64_t tokens = static_cast<int64_t>(request.prompt.size());
  if (tokens == 0) return invalid("the request has no tokens");
  int64_t end = 0;
  for (size_t i = 0; i < request.media.size(); ++i) {
    const MediaItem& item = request.media[i];
    if (item.begin < end || item.length < 1 || item.begin > tokens || item.length > tokens - item.begin) {
      return invalid("the tokens of media item ", i + 1, " are not in the prompt behind those of the item before it");
    }
    if (item.cost < 0 || item.bytes < 0) return invalid("media item ", i + 1, " has a negative cost or size");
    end = item.end();
  }
  if (request.given >= 0 && request.given < tokens) return absl::OkStatus();
  return invalid("the keys and values of ", request.given, " of its ", tokens,
                 " tokens are given; the last is computed here");
}

Scheduler::Scheduler(const SchedulerConfig& config)
    : config_(config),
      blocks_(config.num_blocks),
      encoder_cache_(config.encoder_cache_bytes),
      pace_(config.step_s, config.max_batched_tokens) {}
Scheduler::~Scheduler() = default;

absl::Status Scheduler::add(SchedRequest request, double now) {
  const int64_t tokens = static_cast<int64_t>(request.prompt.size());
  PARVL_CHECK(tokens > 0 && !by_id_.contains(request.id), "a request without tokens, or with a used id");
  PARVL_CHECK(request.given >= 0 && request.given < tokens, "keys and values of more than all tokens but one");
  if (tokens >= config_.max_model_len) {
    return invalid("the prompt has ", tokens, " tokens; the limit is ", config_.max_model_len,
                   " for prompt and answer together, so at most ", config_.max_model_len - 1, " may be prompt");
  }
  for (size_t i = 0; i < request.media.size(); ++i) {
    if (request.media[i].bytes <= config_.encoder_cache_bytes) continue;
    return invalid("media item ", i + 1, " needs ", request.media[i].bytes, " bytes of encoder output, more than the ",
                   config_.encoder_cache_bytes, " of the encoder cache; send it smaller");
  }
  auto sequence = std::make_unique<Sequence>();
  sequence->tokens = std::move(request.prompt);
  sequence->pinned.resize(request.media.size());
  sequence->arrival = sequence->waiting_since = now;
  sequence->request = std::move(request);
  insert_in_order(waiting_, *sequence);
  by_id_.emplace(sequence->request.id, std::move(sequence));
  return absl::OkStatus();
}

void Scheduler::finish(RequestId id) {
  const auto found = by_id_.find(id);
  if (found == by_id_.end()) return;
  Sequence& sequence = *found->second;
  if (sequence.in_flight > 0 || sequence.fetching) {
    sequence.ended = true;
  } else {
    erase(sequence);
  }
}

SchedulerOutput Scheduler::schedule(double now) {
  PARVL_CHECK(!in_flight_, "a step was scheduled while another is in flight");
  SchedulerOutput output;
  output.step = last_step_ = StepId{last_step_.value + 1};
  tokens_left_ = config_.max_batched_tokens;
  encode_left_ = config_.encode_budget;
  in_step_.clear();
  promote_starving(now);
  schedule_running(output);
  schedule_waiting(output);
  give_rest(output);
  for (const RequestId id : output.preempted) by_id_.at(id)->waiting_since = now;
  in_flight_ = !output.sequences.empty();
  return output;
}

void Scheduler::promote_starving(double now) {
  bool any = false;
  for (Sequence* sequence : waiting_) {
    if (sequence->promoted || now - sequence->waiting_since < config_.starvation_s) continue;
    sequence->promoted = any = true;
  }
  if (!any) return;
  std::sort(waiting_.begin(), waiting_.end(), [](const Sequence* a, const Sequence* b) { return goes_before(*a, *b); });
}

// Those that wait for one token first: a long prompt must not make running streams wait.
void Scheduler::schedule_running(SchedulerOutput& output) {
  Sequences decoding, prompts;
  for (Sequence* sequence : running_) {
    (sequence->length() - sequence->computed == 1 ? decoding : prompts).push_back(sequence);
  }
  for (Sequence* sequence : decoding) {
    if (sequence->running) schedule_tokens(*sequence, 1, output);
  }
  answers_ = static_cast<int64_t>(in_step_.size());
  if (answers_ > 0) tokens_left_ = std::min(tokens_left_, pace_.tokens());
  for (size_t i = 0; i < prompts.size(); ++i) {
    const Sequence* const next = i + 1 < prompts.size() ? prompts[i + 1]
                                 : waiting_.empty()     ? nullptr
                                                        : waiting_.front();
    if (prompts[i]->running) schedule_tokens(*prompts[i], part_for(*prompts[i], next), output);
  }
}

// Of the step's tokens, for a prompt behind which `next` wants some too (null: nobody does): half of them, so that a
// short prompt need not wait for the whole of a long one before it.
int64_t Scheduler::part_for(const Sequence& sequence, const Sequence* next) const {
  if (next == nullptr || next->request.priority > sequence.request.priority) return tokens_left_;
  return std::min(tokens_left_, std::max(kLeastPart, (tokens_left_ + 1) / 2));
}

// What nobody else could take.
void Scheduler::give_rest(SchedulerOutput& output) {
  const Sequences turns = in_step_;
  for (Sequence* sequence : turns) {
    if (tokens_left_ == 0) return;
    schedule_tokens(*sequence, tokens_left_, output);
  }
}

// Where somebody had to give way, nobody new comes in.
void Scheduler::schedule_waiting(SchedulerOutput& output) {
  while (!waiting_.empty() && tokens_left_ > 0 && output.preempted.empty()) {
    Sequence& sequence = *waiting_.front();
    if (lacks_memory_still(sequence) || !make_place(sequence, output)) return;
    waiting_.erase(waiting_.begin());
    const int64_t part = part_for(sequence, waiting_.empty() ? nullptr : waiting_.front());
    sequence.running = true;
    insert_in_order(running_, sequence);
    sequence.lack = start_from_prefix_cache(sequence);
    if (schedule_tokens(sequence, part, output)) {
      sequence.lack.reset();
      continue;
    }
    // There is no memory for it now: it waits on, holding nothing.
    release_all(sequence);
    sequence.running = false;
    running_.erase(std::find(running_.begin(), running_.end(), &sequence));
    insert_in_order(waiting_, sequence);
    return;
  }
}

// A place among the running ones: a free one, or that of a sequence of lower priority.
bool Scheduler::make_place(const Sequence& sequence, SchedulerOutput& output) {
  if (static_cast<int64_t>(running_.size()) < config_.max_seqs) return true;
  Sequence* victim = victim_for(sequence, Wanted::kPlace);
  if (victim == nullptr) return false;
  preempt(*victim, output);
  return true;
}

// What is given to it, else as many of its next tokens as memory and encoder outputs allow, and at most `most` more
// than it has in this step. False when memory is what lacks.
bool Scheduler::schedule_tokens(Sequence& sequence, int64_t most, SchedulerOutput& output) {
  if (sequence.fetching) return true;
  if (sequence.lacks_given()) return fetch_given(sequence, output);
  const int64_t wanted = std::min(sequence.length() - sequence.computed, sequence.in_flight + most);
  const int64_t count = count_ready(sequence, wanted, output);
  if (count <= sequence.in_flight) return true;
  if (!grow(sequence, sequence.computed + count, output)) return false;
  SequenceWork work;
  work.id = sequence.request.id;
  work.begin = sequence.computed;
  work.count = count;
  work.samples = sequence.computed + count == sequence.length();
  work.blocks = sequence.blocks;
  for (size_t i = 0; i < sequence.request.media.size(); ++i) {
    const MediaItem& item = sequence.request.media[i];
    if (item.end() <= work.begin || item.begin >= work.begin + count) continue;
    work.media.push_back({static_cast<int32_t>(i), encoder_cache_.find(item.key)->slot});
  }
  tokens_left_ -= count - sequence.in_flight;
  if (sequence.in_flight == 0) {
    in_step_.push_back(&sequence);
    output.sequences.push_back(std::move(work));
  } else {
    const auto place = std::find(in_step_.begin(), in_step_.end(), &sequence) - in_step_.begin();
    output.sequences[static_cast<size_t>(place)] = std::move(work);
  }
  sequence.in_flight = count;
  sequence.samples = sequence.computed + count == sequence.length();
  return true;
}

// All of it at once, whatever the step's budget: nothing is computed.
bool Scheduler::fetch_given(Sequence& sequence, SchedulerOutput& output) {
  if (!grow(sequence, sequence.request.given, output)) return false;
  sequence.fetching = true;
  output.kv_fetches.push_back(
      {sequence.request.id, sequence.computed, sequence.request.given - sequence.computed, sequence.blocks});
  return true;
}

// How many of the next `wanted` tokens can be computed: up to the first item whose encoder output is not there. Asks
// for the outputs of all items that are left, so that encoding goes on while the text before them is computed.
int64_t Scheduler::count_ready(Sequence& sequence, int64_t wanted, SchedulerOutput& output) {
  int64_t count = wanted;
  bool first = true;
  for (size_t i = 0; i < sequence.request.media.size(); ++i) {
    const MediaItem& item = sequence.request.media[i];
    if (item.end() <= sequence.computed) continue;
    const bool ready = require_encoded(sequence, i, std::exchange(first, false), output);
    if (!ready) count = std::min(count, std::max<int64_t>(0, item.begin - sequence.computed));
    // Always in order: an item that comes later must not hold the bytes that this one waits for.
    if (!sequence.pinned[i]) break;
  }
  return count;
}

// Whether the item's output is there; if not, sees to its encoding as far as the budgets go. The next item of a
// sequence
// (`urgent`) may take the place of outputs that sequences behind it hold.
bool Scheduler::require_encoded(Sequence& sequence, size_t index, bool urgent, SchedulerOutput& output) {
  const MediaItem& item = sequence.request.media[index];
  const auto entry = encoder_cache_.find(item.key);
  if (sequence.pinned[index]) return entry->ready;
  if (entry.has_value()) {
    encoder_cache_.pin(item.key);
    sequence.pinned[index] = true;
    ++counts_.encoder_queries;
    ++counts_.encoder_hits;
    return entry->ready;
  }
  const size_t modality = static_cast<size_t>(item.modality);
  int64_t& left = encode_left_[modality];
  if (item.cost > left && left != config_.encode_budget[modality]) return false;
  while (!encoder_cache_.reserve(item.key, item.bytes, output.evicted)) {
    Sequence* victim = urgent ? victim_for(sequence, Wanted::kEncoderBytes) : nullptr;
    if (victim == nullptr) return false;
    preempt(*victim, output);
  }
  left -= item.cost;
  sequence.pinned[index] = true;
  ++counts_.encoder_queries;
  output.encodes.push_back({encoder_cache_.find(item.key)->slot, sequence.request.id, static_cast<int32_t>(index)});
  return false;
}

void Scheduler::preempt(Sequence& sequence, SchedulerOutput& output) {
  release_all(sequence);
  sequence.request.given = 0;  // whoever gave it may have let it go
  sequence.running = false;
  running_.erase(std::find(running_.begin(), running_.end(), &sequence));
  insert_in_order(waiting_, sequence);
  output.preempted.push_back(sequence.request.id);
  ++counts_.preemptions;
}

absl::Status Scheduler::check_step(StepId step) const {
  if (in_flight_ && step == last_step_) return absl::OkStatus();
  return invalid("step ", step.value, " is not in flight");
}

absl::Status Scheduler::check_tokens(const StepTokens& tokens) const {
  PARVL_RETURN_IF_ERROR(check_step(tokens.step));
  if (!(tokens.seconds >= 0 && std::isfinite(tokens.seconds)))
    return invalid("a step took ", tokens.seconds, " seconds");
  size_t wanted = 0;
  for (const Sequence* sequence : in_step_) {
    if (!sequence->samples) continue;
    ++wanted;
    if (sequence->length() == config_.max_model_len) return invalid("a sequence outgrew the model");
  }
  if (wanted == tokens.tokens.size()) return absl::OkStatus();
  return invalid("step ", tokens.step.value, " gave ", tokens.tokens.size(), " tokens for ", wanted, " sequences");
}

void Scheduler::commit(const StepTokens& tokens) {
  if (const absl::Status status = check_tokens(tokens); !status.ok()) {
    PARVL_CHECK(false, std::string(status.message()).c_str());
  }
  in_flight_ = false;
  tell_pace(tokens.seconds);
  size_t next = 0;
  for (Sequence* sequence : std::exchange(in_step_, {})) {
    const bool samples = sequence->samples;
    advance(*sequence);
    if (samples) sequence->tokens.push_back(tokens.tokens[next++]);
    if (sequence->ended) erase(*sequence);
  }
}

// What the step in flight, which took so long, says about the next ones.
void Scheduler::tell_pace(double seconds) {
  const auto add = [](int64_t sum, const Sequence* sequence) { return sum + sequence->in_flight; };
  const int64_t prompts = std::accumulate(in_step_.begin(), in_step_.end(), -answers_, add);
  if (answers_ > 0 && prompts > 0 && seconds > 0) pace_.took(prompts, seconds);
}

void Scheduler::advance(Sequence& sequence) {
  sequence.computed += std::exchange(sequence.in_flight, 0);
  publish_full_blocks(sequence);
  unpin_computed(sequence);
}

std::vector<RequestId> Scheduler::commit_failed(StepId step) {
  PARVL_CHECK(check_step(step).ok(), "the failure of a step that is not in flight");
  in_flight_ = false;
  std::vector<RequestId> ids;
  for (Sequence* sequence : std::exchange(in_step_, {})) {
    ids.push_back(sequence->request.id);
    sequence->in_flight = 0;
    erase(*sequence);
  }
  return ids;
}

void Scheduler::commit_kv(RequestId id, bool ok) {
  PARVL_CHECK(fetches(id), "keys and values of a request that fetches none");
  Sequence& sequence = *by_id_.at(id);
  sequence.fetching = false;
  const int64_t given = std::exchange(sequence.request.given, 0);
  if (sequence.ended) return erase(sequence);
  ++(ok ? counts_.kv_fetched : counts_.kv_fetch_failures);
  if (!ok) return;
  counts_.kv_fetched_tokens += given - sequence.computed;
  sequence.computed = given;
  publish_full_blocks(sequence);
}

bool Scheduler::fetches(RequestId id) const {
  const auto found = by_id_.find(id);
  return found != by_id_.end() && found->second->fetching;
}

SchedulerStats Scheduler::stats() const {
  SchedulerStats out = counts_;
  out.running = static_cast<int64_t>(running_.size());
  out.waiting = static_cast<int64_t>(waiting_.size());
  out.blocks = blocks_.num_blocks();
  out.blocks_used = blocks_.num_blocks() - blocks_.num_free();
  out.free_kv_tokens = blocks_.num_free() * config_.block_size;
  for (const auto& [id, sequence] : by_id_) {
    out.pending_tokens += sequence->length() - std::max(sequence->computed, sequence->request.given);
  }
  out.encoder_bytes = encoder_cache_.capacity_bytes();
  out.encoder_bytes_used = encoder_cache_.used_bytes();
  out.encoder_bytes_held = encoder_cache_.held_bytes();
  return out;
}

}  // namespace parvl
