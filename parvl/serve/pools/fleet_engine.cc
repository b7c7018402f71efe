#include <absl/strings/str_cat.h>

#include <algorithm>
#include <utility>

#include "parvl/base/check.h"
#include "parvl/base/log.h"
#include "parvl/serve/pools/fleet_engine_parts.h"
#include "parvl/serve/pools/pixels.h"
#include "parvl/serve/pools/prefix_chain.h"
#include "parvl/serve/pools/wire.h"

namespace parvl {
namespace {

constexpr int64_t kStartFailures = 3;    // of one instance before the first time that all are ready
constexpr double kStandstill_s = 1;      // a turn of the thread that takes longer
constexpr double kLongestWait_s = 3600;  // of the thread, when nothing is due

// What it holds now, which goes with it.
void add_held(EngineStats& to, const EngineStats& more) {
  to.running += more.running;
  to.waiting += more.waiting;
  to.blocks += more.blocks;
  to.blocks_used += more.blocks_used;
  to.encoder_bytes_used += more.encoder_bytes_used;
  to.free_kv_tokens += more.free_kv_tokens;
  to.pending_tokens += more.pending_tokens;
  to.encoder_bytes += more.encoder_bytes;
  to.encoder_bytes_held += more.encoder_bytes_held;
}

}  // namespace

void add_counts(EngineStats& to, const EngineStats& more) {
  to.preemptions += more.preemptions;
  to.prefix_queries += more.prefix_queries;
  to.prefix_hits += more.prefix_hits;
  to.block_lookups += more.block_lookups;
  to.encoder_queries += more.encoder_queries;
  to.encoder_hits += more.encoder_hits;
  to.backbone_busy_s += more.backbone_busy_s;
  to.encoder_busy_s += more.encoder_busy_s;
  to.kv_fetched += more.kv_fetched;
  to.kv_fetched_tokens += more.kv_fetched_tokens;
  to.kv_fetch_failures += more.kv_fetch_failures;
  to.handed_over += more.handed_over;
  to.fetched += more.fetched;
  to.fetch_busy_s += more.fetch_busy_s;
  for (size_t i = 0; i < to.work.size(); ++i) {
    to.work[i].replayed += more.work[i].replayed;
    to.work[i].launched += more.work[i].launched;
  }
}

FleetEngine::FleetEngine(FleetOptions options, std::unique_ptr<InstanceStarter> starter, const Clock& clock)
    : options_(std::move(options)),
      clock_(clock),
      grammars_(std::make_unique<GrammarCompiler>(options_.front.prompts->tokenizer(), options_.front.end_tokens)),
      starter_(std::move(starter)),
      fleet_(options_.fleet, options_.record),
      links_(fleet_.fleet().instances().size()),
      past_(options_.fleet.pools.size()) {
  const std::vector<FleetPool>& pools = options_.fleet.pools;
  for (size_t i = pools.size(); i-- > 0;) {
    if (!pools[i].generates && !pools[i].takes_over) encoders_ = i;
  }
  for (const InstanceView& view : fleet_.fleet().instances()) touched_.insert(view.id);
}

absl::StatusOr<std::unique_ptr<FleetEngine>> FleetEngine::start(FleetOptions options,
                                                                std::unique_ptr<InstanceStarter> starter,
                                                                const Clock& clock) {
  std::unique_ptr<FleetEngine> engine(new FleetEngine(std::move(options), std::move(starter), clock));
  FleetEngine* const self = engine.get();
  PARVL_ASSIGN_OR_RETURN(
      engine->server_,
      StreamServer::listen(
          engine->options_.pixels->token(),
          {.message =
               [self](StreamId stream, wire::FromInstance message) {
                 self->post([self, stream, message = std::move(message)] { self->take(stream, message); });
               },
           .closed = [self](StreamId stream) { self->post([self, stream] { self->lost_stream(stream); }); }}));
  engine->starter_->set_on_exit([self](InstanceId id, int64_t epoch, const std::string& how) {
    self->post([self, id, epoch, how] {
      self->touched_.insert(id);
      self->act(self->fleet_.instance(
          id, {.kind = InstanceEvent::Kind::kExited, .at_s = self->now(), .epoch = epoch, .reason = how}));
    });
  });
  if (engine->options_.watch) engine->options_.watch(self);
  engine->post([self] { self->act(self->fleet_.start(self->now())); });
  engine->thread_ = std::thread([self] { self->loop(); });
  PARVL_RETURN_IF_ERROR(engine->wait_ready());
  return engine;
}

FleetEngine::~FleetEngine() {
  if (options_.watch) options_.watch(nullptr);
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  for (auto* requests : {&live_, &submitted_}) {
    for (auto& [id, live] : *requests) live->request.on_end(std::exchange(live->result, {}));
  }
  for (size_t i = 0; i < links_.size(); ++i) starter_->kill(InstanceId{static_cast<int64_t>(i)}, links_[i].epoch);
  server_.reset();  // its handlers may still have posted; nobody runs that any more
  starter_.reset();
}

absl::Status FleetEngine::wait_ready() {
  std::unique_lock lock(mutex_);
  absl::Status failure;
  changed_.wait(lock, [&] {
    bool all = !published_.instances.empty();
    for (const InstanceStatus& instance : published_.instances) {
      // Somebody wants it gone already: it is not waited for.
      if (instance.state == InstanceState::kDraining || instance.state == InstanceState::kGone) continue;
      all = all && instance.open;
      if (instance.open || instance.failures == 0) continue;
      const absl::Status why = instance.refusal;
      if (why.ok() && instance.failures < kStartFailures) continue;
      const std::string name = absl::StrCat("instance ", instance.id.value, " of ",
                                            options_.fleet.pools[instance.pool].name, " cannot start");
      failure = why.ok() ? failed(name, ": ", instance.reason) : with_context(why, name);
    }
    return all || !failure.ok();
  });
  return failure;
}

void FleetEngine::post(Task task) {
  {
    std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  changed_.notify_all();
}

// Time is told only once all that was heard has been looked at, and not right after this thread, or the whole process,
// stood still: else everybody's silence would be taken for theirs.
void FleetEngine::loop() {
  double calm_s = now();  // from when on time may be told
  for (;;) {
    std::deque<Task> tasks;
    {
      std::unique_lock lock(mutex_);
      const double due_s = std::max(calm_s, fleet_.fleet().next_tick_s());
      const double wait_s = std::clamp(due_s - now(), 0.0, kLongestWait_s), begun_s = now();
      changed_.wait_for(lock, std::chrono::duration<double>(wait_s), [this] { return stopping_ || !tasks_.empty(); });
      if (stopping_) return;
      if (now() - begun_s > wait_s + kStandstill_s) calm_s = now() + kStandstill_s;
      tasks.swap(tasks_);
    }
    const double begun_s = now();
    for (const Task& task : tasks) task();
    if (now() - begun_s > kStandstill_s) calm_s = now() + kStandstill_s;
    bool heard_all;
    {
      std::lock_guard lock(mutex_);
      heard_all = tasks_.empty();
    }
    if (heard_all && now() >= std::max(calm_s, fleet_.fleet().next_tick_s())) act(fleet_.tick(now()));
    publish();
  }
}

InstanceStatus FleetEngine::status_of(InstanceId id) {
  const Link& link = this->link(id);
  InstanceStatus status;
  static_cast<InstanceView&>(status) = fleet_.fleet().instance(id);
  status.pids = link.pids;
  status.device = link.device;
  status.stats = link.counts;
  status.refusal = link.refusal;
  return status;
}

// So that other threads see a state that the decisions were made on.
void FleetEngine::publish() {
  const Fleet& fleet = fleet_.fleet();
  Snapshot next;
  next.by_pool = past_;
  for (const InstanceView& view : fleet.instances()) {
    const EngineStats& counts = link(view.id).counts;
    add_counts(next.by_pool[view.pool], counts);
    add_held(next.by_pool[view.pool], counts);
  }
  for (const EngineStats& pool : next.by_pool) {
    add_counts(next.stats, pool);
    add_held(next.stats, pool);
  }
  next.parked_encodings = fleet.parked(true);
  next.parked_generations = fleet.parked(false);
  // A request that is encoded or moved runs in no engine, but it runs.
  const auto requests = static_cast<int64_t>(fleet.requests());
  next.stats.waiting = std::min(requests, next.stats.waiting + next.parked_encodings + next.parked_generations);
  next.stats.running = requests - next.stats.waiting;
  next.capacity = fleet.capacity();
  next.health = fleet.health();
  next.accepts = fleet.can_generate();
  next.will_accept = fleet.will_generate();
  if (encoders_.has_value()) next.accepts_images = fleet.can_encode(now());
  std::function<void()> tell;
  {
    std::lock_guard lock(mutex_);
    next.instances = std::move(published_.instances);
    next.instances.resize(links_.size());
    for (const InstanceId id : std::exchange(touched_, {})) {
      next.instances[static_cast<size_t>(id.value)] = status_of(id);
    }
    for (const InstanceStatus& one : next.instances) {
      const bool passes = options_.fleet.pools[one.pool].hands_over;  // what it computes stays elsewhere
      next.kv_tokens += one.open && !passes ? one.room.kv_tokens : 0;
    }
    const bool differs = next.capacity != published_.capacity || next.kv_tokens != published_.kv_tokens ||
                         next.accepts.ok() != published_.accepts.ok() ||
                         next.will_accept.ok() != published_.will_accept.ok();
    if (differs) tell = capacity_changed_;
    published_ = std::move(next);
  }
  changed_.notify_all();
  if (tell) tell();
}

RequestId FleetEngine::submit(EngineRequest request) {
  PARVL_CHECK(request.prompt != nullptr && request.on_token && request.on_end, "an incomplete request");
  for (const auto& image : request.prompt->images) {
    PARVL_CHECK(image->place != nullptr, "an image whose patches do not lie where instances read them");
  }
  FleetRequest what;
  what.chain = prefix_chain(*request.prompt, request.cache_salt, options_.fleet.block_tokens);
  const auto tokens = static_cast<int64_t>(request.prompt->ids.size());
  const int64_t room = std::max<int64_t>(0, max_model_len() - tokens), most = request.sampling.max_tokens;
  what.needs = {tokens, tokens + (most < 0 ? room : std::min(most, room))};
  auto live = std::make_unique<Live>();
  if (encoders_.has_value()) {
    for (const auto& image : request.prompt->images) {
      what.patches.push_back(image->num_patches());
      what.item_key.push_back(image_hash(*image));
    }
    what.shape.items = what.patches.size();
    live->items.resize(what.shape.items);
  }
  live->request = std::move(request);
  live->arrival_s = now();
  live->result.prompt_tokens = tokens;
  RequestId id;
  {
    std::lock_guard lock(mutex_);
    id = RequestId{next_id_++};
    submitted_.emplace(id, std::move(live));
  }
  post([this, id, what = std::move(what)] {
    {
      std::lock_guard lock(mutex_);
      live_.emplace(id, std::move(submitted_.extract(id).mapped()));
    }
    act(fleet_.arrive(id, what, now()));
  });
  return id;
}

void FleetEngine::cancel(RequestId id) {
  post([this, id] { act(fleet_.request(id, {.kind = RequestEvent::Kind::kLeft}, now())); });
}

void FleetEngine::drain(InstanceId id) {
  post([this, id] {
    touched_.insert(id);
    act(fleet_.instance(id, {.kind = InstanceEvent::Kind::kDrain, .at_s = now()}));
  });
}

int64_t FleetEngine::max_running() const {
  std::lock_guard lock(mutex_);
  return published_.capacity;
}
int64_t FleetEngine::kv_tokens() const {
  std::lock_guard lock(mutex_);
  return published_.kv_tokens;
}
EngineStats FleetEngine::stats() const {
  std::lock_guard lock(mutex_);
  return published_.stats;
}
std::vector<EngineStats> FleetEngine::stats_by_pool() const {
  std::lock_guard lock(mutex_);
  return published_.by_pool;
}
absl::Status FleetEngine::health() const {
  std::lock_guard lock(mutex_);
  return published_.health;
}
absl::Status FleetEngine::accepts() const {
  std::lock_guard lock(mutex_);
  return published_.accepts;
}
absl::Status FleetEngine::will_accept() const {
  std::lock_guard lock(mutex_);
  return published_.will_accept;
}
absl::Status FleetEngine::accepts_images() const {
  std::lock_guard lock(mutex_);
  return published_.accepts_images;
}
int64_t FleetEngine::parked(bool encodings) const {
  std::lock_guard lock(mutex_);
  return encodings ? published_.parked_encodings : published_.parked_generations;
}
void FleetEngine::watch_capacity(std::function<void()> changed) {
  std::lock_guard lock(mutex_);
  capacity_changed_ = std::move(changed);
}
std::vector<InstanceStatus> FleetEngine::instances() const {
  std::lock_guard lock(mutex_);
  return published_.instances;
}
std::vector<std::pair<std::string, std::string>> FleetEngine::places() const {
  std::vector<std::pair<std::string, std::string>> out;
  for (size_t pool = 0; pool < options_.fleet.pools.size(); ++pool) {
    for (const std::string& module : options_.engines[pool].load.modules) {
      const FleetPool& of = options_.fleet.pools[pool];
      out.emplace_back(module, absl::StrCat(of.name, " (", of.instances, of.instances == 1 ? " instance" : " instances",
                                            " on ", options_.engines[pool].load.device, ")"));
    }
  }
  return out;
}
std::string FleetEngine::device_name() const {
  std::lock_guard lock(mutex_);
  for (const InstanceStatus& instance : published_.instances) {
    if (!instance.device.empty()) return instance.device;
  }
  return "";
}

void FleetEngine::act(const Fleet::Actions& actions) {
  for (const FleetAction& action : actions) {
    if (const auto* order = std::get_if<InstanceOrder>(&action)) {
      act(*order);
    } else {
      act(std::get<RequestOrder>(action));
    }
  }
}

}  // namespace parvl
