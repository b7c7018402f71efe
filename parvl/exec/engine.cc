#include <algorithm>
#include <utility>

#include "parvl/base/check.h"
#include "parvl/base/file.h"
#include "parvl/exec/engine_loop.h"
#include "parvl/exec/text_stream.h"

namespace parvl {
namespace {

bool is_known(const std::array<uint8_t, 32>& key) {
  return std::any_of(key.begin(), key.end(), [](uint8_t byte) { return byte != 0; });
}

// The identity of an image whose source is not known: what the encoder reads of it.
MediaKey hash_of(const ProcessedImage& image) {
  const std::string_view patches(reinterpret_cast<const char*>(image.patches.data()),
                                 image.patches.size() * sizeof(float));
  return {sha256(absl::StrCat(image.grid_t, " ", image.grid_h, " ", image.grid_w, " ", image.merge_size, " ",
                              sha256_hex(patches)))};
}

}  // namespace

// One request from its arrival to its end. Times are seconds.
struct EngineLoop::Live {
  EngineRequest request;
  TextStream stream;
  GenerateResult result;
  double arrival = 0;  // seconds, as are those below
  Phase phase = Phase::kQueue;
  double started = 0, prefill = 0, first_token = 0;  // when it left each phase's predecessor
  double last_token = 0;
  std::vector<std::pair<double, double>> encodes = {};  // of its items, from when to when
  int encoding = 0;                                     // encodings under way
  bool in_step = false;                                 // a step has held a part of it
  bool started_told = false;                            // to the trace
};

std::vector<std::pair<std::string, std::string>> Engine::places() const {
  std::vector<std::pair<std::string, std::string>> out = {{"llm_backbone", device_name()}};
  if (!prompts().has_images()) return out;
  out.emplace_back("vision_encoder", device_name());
  out.emplace_back("projector", device_name());
  return out;
}

EngineLoop::EngineLoop(EngineConfig config, std::unique_ptr<ModelExecutor> executor, const Clock& clock)
    : config_(std::move(config)),
      grammars_(config_.prompts->tokenizer(), config_.end_tokens),
      executor_(std::move(executor)),
      clock_(clock),
      scheduler_(config_.scheduler, config_.record),
      trace_(config_.timeline) {
  executor_->set_notify([this] {
    {
      std::lock_guard lock(mutex_);
      completed_ = true;
    }
    changed_.notify_one();
  });
  thread_ = std::thread([this] { loop(); });
}

EngineLoop::~EngineLoop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  thread_.join();
  executor_.reset();  // a job may still notify; after this none does
}

RequestId EngineLoop::submit(EngineRequest request) {
  PARVL_CHECK(request.prompt != nullptr && request.on_token && request.on_end, "an incomplete request");
  RequestId id;
  {
    std::lock_guard lock(mutex_);
    id = RequestId{next_id_++};
    commands_.push_back({id, std::move(request)});
  }
  changed_.notify_one();
  return id;
}

void EngineLoop::cancel(RequestId id) {
  {
    std::lock_guard lock(mutex_);
    commands_.push_back({id, {}});
  }
  changed_.notify_one();
}

EngineStats EngineLoop::stats() const {
  std::lock_guard lock(mutex_);
  return stats_;
}

void EngineLoop::loop() {
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return stopping_ || completed_ || !commands_.empty(); });
      if (stopping_) break;
    }
    step();
  }
  std::vector<RequestId> ids;
  for (const auto& [id, live] : live_) ids.push_back(id);
  for (const RequestId id : ids) end(id, absl::OkStatus());
  for (const Command& command : std::exchange(commands_, {})) {  // submitted too late to be seen
    if (command.request.prompt != nullptr) command.request.on_end(GenerateResult{});
  }
}

// One turn: what came in, what was computed, what is next.
void EngineLoop::step() {
  std::vector<Command> commands;
  {
    std::lock_guard lock(mutex_);
    commands.swap(commands_);
    completed_ = false;
  }
  for (Command& command : commands) {
    if (command.request.prompt == nullptr) {
      end(command.id, absl::OkStatus());
    } else {
      add(command.id, std::move(command.request));
    }
  }
  while (auto completion = executor_->poll()) commit(*completion);
  if (!in_flight_) submit_step();
  const SchedulerStats counts = scheduler_.scheduler().stats();
  trace_.counts(clock_.now_seconds(), counts.running, counts.waiting,
                static_cast<double>(counts.blocks_used) / static_cast<double>(counts.blocks));
  static_cast<SchedulerStats&>(done_) = counts;
  {
    std::lock_guard lock(mutex_);
    stats_ = done_;
  }
  if (config_.hooks.on_turn) config_.hooks.on_turn();
}

void EngineLoop::submit_step() {
  const double now = clock_.now_seconds();
  const SchedulerOutput output = scheduler_.schedule(now);
  parts_.clear();
  int64_t tokens = 0;
  for (const SequenceWork& work : output.sequences) {
    tokens += work.count;
    Live& live = *live_.at(work.id);
    parts_.push_back({work.id, work.begin, work.count, work.samples, live.phase != Phase::kDecode});
    if (!std::exchange(live.in_step, true)) live.result.cached_tokens = work.begin;
  }
  for (const EncodeWork& work : output.encodes) {
    encoding_.emplace(work.slot, work);
    ++live_.at(work.id)->encoding;
  }
  for (const RequestId id : output.preempted) trace_.preempted(live_.at(id)->request.track, now);
  in_flight_ = !output.sequences.empty();
  if (in_flight_ && config_.hooks.on_submit) config_.hooks.on_submit(tokens);
  executor_->submit(output);
  if (in_flight_ || !output.encodes.empty()) trace_.scheduled(now, clock_.now_seconds(), output);
}

// An answer that goes on: its text so far is shown, but for what waits for more.
absl::Status EngineLoop::take_up(const EngineRequest& request, TextStream& stream) const {
  const Tokenizer& tokenizer = prompts().tokenizer();
  for (const TokenId token : request.generated) {
    const auto delta = stream.push(token, tokenizer.token_bytes(token), tokenizer.is_special(token));
    if (delta.finish == FinishReason::kNone) continue;
    return invalid("the answer that was to go on had ended with one of its ", request.generated.size(), " tokens");
  }
  return absl::OkStatus();
}

void EngineLoop::add(RequestId id, EngineRequest request) {
  const double now = clock_.now_seconds();
  SamplingParams& sampling = request.sampling;
  const int64_t tokens = static_cast<int64_t>(request.prompt->ids.size());
  const int64_t room = config_.scheduler.max_model_len - tokens;
  if (room > 0) sampling.max_tokens = sampling.max_tokens < 0 ? room : std::min(sampling.max_tokens, room);
  TextStream stream(sampling, config_.end_tokens);
  absl::Status status = executor_->begin(id, request);
  if (status.ok()) {
    status = take_up(request, stream);
    SchedRequest described = describe(id, request);
    if (status.ok()) status = validate(described);
    if (status.ok()) status = scheduler_.add(std::move(described), now);
    if (!status.ok()) executor_->end(id);
  }
  if (!status.ok()) {
    request.on_end(status);
    return;
  }
  auto live = std::make_unique<Live>(Live{std::move(request), std::move(stream), {}, now});
  live->result.prompt_tokens = tokens;
  trace_.arrived(live->request.track, now, tokens);
  live_.emplace(id, std::move(live));
}

SchedRequest EngineLoop::describe(RequestId id, const EngineRequest& request) const {
  SchedRequest out;
  out.id = id;
  out.priority = request.priority;
  out.prompt = request.prompt->ids;
  out.prompt.insert(out.prompt.end(), request.generated.begin(), request.generated.end());
  out.cache_salt = request.cache_salt;
  if (request.kv != nullptr) out.given = request.kv->tokens();
  for (const MediaSpan& span : request.prompt->media) {
    const ProcessedImage& image = *request.prompt->images[static_cast<size_t>(span.image_index)];
    MediaItem item;
    item.key = is_known(image.key) ? MediaKey{image.key} : hash_of(image);
    item.begin = span.begin;
    item.length = span.length;
    // What is fetched costs the encoder nothing. It is bounded by the encoder cache, which has room for it first.
    item.cost = request.source_of(span.image_index) == nullptr ? image.num_patches() : 0;
    item.bytes = span.length * config_.encoder_bytes_a_token;
    out.media.push_back(item);
  }
  return out;
}

void EngineLoop::commit(const Completion& completion) {
  switch (completion.kind) {
    case Completion::Kind::kStep:
      return commit_step(completion);
    case Completion::Kind::kEncode:
      return commit_encode(completion);
    case Completion::Kind::kKvFetch:
      return commit_kv(completion);
  }
}

void EngineLoop::commit_encode(const Completion& completion) {
  if (completion.fetched) {
    done_.fetched += completion.status.ok();
    fetch_busy_.add(completion.start_s, completion.end_s);
    done_.fetch_busy_s = fetch_busy_.total_s();
  } else {
    encoder_busy_.add(completion.start_s, completion.end_s);
    done_.encoder_busy_s = encoder_busy_.total_s();
    count(WorkKind::kEncode, completion);
  }
  const EncodeWork work = encoding_.extract(completion.slot).mapped();
  if (const auto found = live_.find(work.id); found != live_.end()) {
    Live& live = *found->second;
    --live.encoding;
    begin_work(live, completion.start_s);
    if (completion.fetched) {
      live.result.fetch_ms += (completion.end_s - completion.start_s) * 1e3;
    } else {
      live.encodes.emplace_back(completion.start_s, completion.end_s);
    }
    const int64_t tokens = live.request.prompt->media[static_cast<size_t>(work.item)].length;
    trace_.encoded(completion, live.request.track, work.item, tokens);
  }
  for (const RequestId id : scheduler_.commit_encode(completion.slot, completion.status.ok())) {
    end(id, completion.status);
  }
}

// What did not come is computed here.
void EngineLoop::commit_kv(const Completion& completion) {
  fetch_busy_.add(completion.start_s, completion.end_s);
  done_.fetch_busy_s = fetch_busy_.total_s();
  if (const auto found = live_.find(completion.request); found != live_.end()) {
    Live& live = *found->second;
    begin_work(live, completion.start_s);
    live.result.fetch_ms += (completion.end_s - completion.start_s) * 1e3;
    trace_.kv_fetched(completion, live.request.track, live.request.kv->tokens());
  }
  scheduler_.commit_kv(completion.request, completion.status.ok());
}

void EngineLoop::commit_step(const Completion& completion) {
  in_flight_ = false;
  account(completion);
  if (!completion.status.ok()) {
    for (const RequestId id : scheduler_.commit_failed(completion.step)) end(id, completion.status);
    return;
  }
  StepTokens tokens{completion.step, {}, std::max(0.0, completion.end_s - completion.start_s)};
  for (const SampledToken& token : completion.tokens) tokens.tokens.push_back(token.id);
  // First the scheduler, so that a request that ends here frees what it holds for the next step.
  scheduler_.commit(tokens);
  size_t next = 0;
  for (const StepPart& part : parts_) {
    if (part.samples) deliver(part.id, completion.tokens[next++]);
  }
}

// What the step says of the time that its requests have taken.
void EngineLoop::account(const Completion& completion) {
  done_.backbone_busy_s += completion.end_s - completion.start_s;
  trace_.step(completion, parts_);
  EngineStep report = {static_cast<int64_t>(parts_.size()), 0, completion.end_s - completion.start_s};
  for (const StepPart& part : parts_) {
    report.tokens += part.count;
    const auto found = live_.find(part.id);
    if (found == live_.end()) continue;  // cancelled while its step ran
    Live& live = *found->second;
    begin_work(live, completion.start_s);
    if (live.phase == Phase::kBeforePrefill) {
      live.phase = Phase::kPrefill;
      live.prefill = completion.start_s;
      trace_.prefill_begins(live.request.track, completion.start_s, live.result.cached_tokens);
    }
    trace_.part(live.request.track, completion, part);
  }
  count(report.is_decode() ? WorkKind::kDecode : WorkKind::kPrefill, completion);
  if (config_.hooks.on_step) config_.hooks.on_step(report);
}

void EngineLoop::count(WorkKind work, const Completion& completion) {
  WorkCount& counts = done_.work[static_cast<size_t>(work)];
  ++(completion.replayed ? counts.replayed : counts.launched);
}

// An encoding or step for it has started at `at`: it waits no longer.
void EngineLoop::begin_work(Live& live, double at) {
  const bool first = live.phase == Phase::kQueue;
  if (first) live.phase = Phase::kBeforePrefill;
  live.started = first ? at : std::min(live.started, at);
  live.result.queue_ms = (live.started - live.arrival) * 1e3;
  if (live.encoding == 0) tell_started(live);  // else one that started earlier may still be heard of
}

void EngineLoop::tell_started(Live& live) {
  if (!std::exchange(live.started_told, true)) trace_.queued(live.request.track, live.arrival, live.started);
}

void EngineLoop::take_first_token(Live& live, double now) {
  GenerateResult& result = live.result;
  live.phase = Phase::kDecode;
  live.first_token = now;
  result.ttft_ms = (now - live.arrival) * 1e3;
  result.prefill_ms = (now - live.prefill) * 1e3;
  for (const auto& [begin, end] : live.encodes) {
    result.encode_ms += (end - begin) * 1e3;
    result.overlap_ms += std::max(0.0, end - std::max(begin, live.prefill)) * 1e3;
  }
  trace_.first_token(live.request.track, now);
}

void EngineLoop::deliver(RequestId id, const SampledToken& token) {
  const auto found = live_.find(id);
  if (found == live_.end()) return;  // cancelled while its step ran
  if (!token.status.ok()) return end(id, token.status);
  Live& live = *found->second;
  GenerateResult& result = live.result;
  const double now = clock_.now_seconds();
  live.last_token = now;
  if (live.phase != Phase::kDecode) {
    take_first_token(live, now);
  } else {
    result.tpot_ms = (now - live.first_token) * 1e3 / static_cast<double>(result.token_ids.size());
  }
  const Tokenizer& tokenizer = prompts().tokenizer();
  TextStream::Delta delta =
      live.stream.push(token.id, tokenizer.token_bytes(token.id), tokenizer.is_special(token.id), token.last);
  TokenEvent event{token.id, std::move(delta.text), token.logprob, delta.finish};
  result.token_ids.push_back(event.token_id);
  result.text += event.text;
  if (live.request.sampling.logprobs) result.logprobs.push_back(event.logprob);
  result.finish = event.finish;
  live.request.on_token(event);
  if (event.finish == FinishReason::kNone) {
    if (live.request.kv_room == nullptr) return;
    result.handed_over = true;
    ++done_.handed_over;
  }
  end(id, absl::OkStatus());
}

// Frees everything first: whoever hears of the end may count on it.
void EngineLoop::end(RequestId id, absl::Status status) {
  auto live = live_.extract(id);
  if (live.empty()) return;
  scheduler_.finish(id);
  executor_->end(id);
  Live& ended = *live.mapped();
  if (ended.phase == Phase::kQueue) ended.started = clock_.now_seconds();
  tell_started(ended);
  // A generation ends with its last token, as its times say; one that is cancelled ends now.
  const bool finished = ended.result.finish != FinishReason::kNone;
  trace_.ended(ended.request.track, ended.phase, finished ? ended.last_token : clock_.now_seconds(),
               static_cast<int64_t>(ended.result.token_ids.size()));
  if (status.ok()) {
    ended.request.on_end(ended.result);
  } else {
    ended.request.on_end(status);
  }
}

}  // namespace parvl
