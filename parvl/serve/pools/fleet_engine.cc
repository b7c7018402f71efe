#include <absl/strings/str_cat.h>

#include <algorithm>
#include <utility>

#include "parvl/base/check.h"
#include "parvl/base/log.h"
#include "parvl/serve/pools/fleet_engine_parts.h"
#include "parvl/serve/pools/prefix_chain.h"
#include "parvl/serve/pools/wire.h"

namespace parvl {
namespace {

constexpr int64_t kStartFailures = 3;    // of one instance before the first time that all are ready
constexpr double kStandstill_s = 1;      // a turn of the thread that takes longer
constexpr double kLongestWait_s = 3600;  // of the thread, when nothing is due

void add(EngineStats& to, const EngineStats& more) {
  to.preemptions += more.preemptions;
  to.prefix_queries += more.prefix_queries;
  to.prefix_hits += more.prefix_hits;
  to.block_lookups += more.block_lookups;
  to.encoder_queries += more.encoder_queries;
  to.encoder_hits += more.encoder_hits;
  to.backbone_busy_s += more.backbone_busy_s;
  to.encoder_busy_s += more.encoder_busy_s;
  to.fetched += more.fetched;
  to.fetch_busy_s += more.fetch_busy_s;
  for (size_t i = 0; i < to.work.size(); ++i) {
    to.work[i].replayed += more.work[i].replayed;
    to.work[i].launched += more.work[i].launched;
  }
}

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

FleetEngine::FleetEngine(FleetOptions options, std::unique_ptr<InstanceStarter> starter, const Clock& clock)
    : options_(std::move(options)),
      clock_(clock),
      grammars_(std::make_unique<GrammarCompiler>(options_.front.prompts->tokenizer(), options_.front.end_tokens)),
      starter_(std::move(starter)),
      fleet_(options_.fleet, options_.record),
      links_(fleet_.fleet().instances().size()) {
  for (const FleetPool& pool : options_.fleet.pools) encodes_apart_ = encodes_apart_ || !pool.generates;
}

absl::StatusOr<std::unique_ptr<FleetEngine>> FleetEngine::start(FleetOptions options,
                                                                std::unique_ptr<InstanceStarter> starter,
                                                                const Clock& clock) {
  std::unique_ptr<FleetEngine> engine(new FleetEngine(std::move(options), std::move(starter), clock));
  FleetEngine* const self = engine.get();
  TransferSourceOptions pixels;
  pixels.name = "gateway";
  pixels.epoch = 1;
  pixels.token = engine->options_.token;
  pixels.clock = &clock;
  pixels.arena_bytes = engine->options_.pixel_bytes;
  PARVL_ASSIGN_OR_RETURN(engine->pixels_, TransferSource::start(pixels));
  PARVL_ASSIGN_OR_RETURN(
      engine->server_,
      StreamServer::listen(
          engine->options_.token,
          {.message =
               [self](StreamId stream, wire::FromInstance message) {
                 self->post([self, stream, message = std::move(message)] { self->take(stream, message); });
               },
           .closed = [self](StreamId stream) { self->post([self, stream] { self->lost_stream(stream); }); }}));
  engine->starter_->set_on_exit([self](InstanceId id, int64_t epoch, const std::string& how) {
    self->post([self, id, epoch, how] {
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

// So that other threads see a state that the decisions were made on.
void FleetEngine::publish() {
  Snapshot next;
  next.stats = past_;
  for (const InstanceView& view : fleet_.fleet().instances()) {
    const Link& link = this->link(view.id);
    InstanceStatus status;
    static_cast<InstanceView&>(status) = view;
    status.pids = link.pids;
    status.device = link.device;
    status.stats = link.counts;
    status.refusal = link.refusal;
    add(next.stats, link.counts);
    add_held(next.stats, link.counts);
    if (view.open) next.kv_tokens += view.room.kv_tokens;
    next.instances.push_back(std::move(status));
  }
  // A request that is encoded or moved runs in no engine, but it runs.
  const auto requests = static_cast<int64_t>(fleet_.fleet().requests());
  next.stats.waiting = std::min(requests, next.stats.waiting + static_cast<int64_t>(fleet_.fleet().parked()));
  next.stats.running = requests - next.stats.waiting;
  next.capacity = fleet_.fleet().capacity();
  next.health = fleet_.fleet().health();
  next.accepts = fleet_.fleet().can_generate();
  std::function<void()> tell;
  {
    std::lock_guard lock(mutex_);
    const bool differs = next.capacity != published_.capacity || next.kv_tokens != published_.kv_tokens ||
                         next.accepts.ok() != published_.accepts.ok();
    if (differs) tell = capacity_changed_;
    published_ = std::move(next);
  }
  changed_.notify_all();
  if (tell) tell();
}

RequestId FleetEngine::submit(EngineRequest request) {
  PARVL_CHECK(request.prompt != nullptr && request.on_token && request.on_end, "an incomplete request");
  FleetRequest what;
  what.chain = prefix_chain(*request.prompt, request.cache_salt, options_.fleet.block_tokens);
  const auto tokens = static_cast<int64_t>(request.prompt->ids.size());
  const int64_t room = std::max<int64_t>(0, max_model_len() - tokens), most = request.sampling.max_tokens;
  what.needs = {tokens, tokens + (most < 0 ? room : std::min(most, room))};
  auto live = std::make_unique<Live>();
  if (encodes_apart_) {
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
  post([this, id] { act(fleet_.instance(id, {.kind = InstanceEvent::Kind::kDrain, .at_s = now()})); });
}

bool FleetEngine::stopping() const {
  std::lock_guard lock(mutex_);
  return stopping_;
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
absl::Status FleetEngine::health() const {
  std::lock_guard lock(mutex_);
  return published_.health;
}
absl::Status FleetEngine::accepts() const {
  std::lock_guard lock(mutex_);
  return published_.accepts;
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

FleetEngine::Link& FleetEngine::link(InstanceId id) { return links_[static_cast<size_t>(id.value)]; }

void FleetEngine::send(InstanceId id, wire::Command command) {
  const Link& link = this->link(id);
  if (link.stream.has_value()) server_->send(*link.stream, std::move(command));
}

// Nobody gives that process anything any more, wherever it still asks.
void FleetEngine::fence(InstanceId id, int64_t epoch) {
  pixels_->fence(instance_name(id), epoch);
  for (size_t i = 0; i < links_.size(); ++i) {
    if (links_[i].stream == std::nullopt || static_cast<int64_t>(i) == id.value) continue;
    wire::Command command;
    command.mutable_fence()->set_instance(id.value);
    command.mutable_fence()->set_epoch(epoch);
    send(InstanceId{static_cast<int64_t>(i)}, std::move(command));
  }
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

void FleetEngine::act(const InstanceOrder& order) {
  using Kind = InstanceAction::Kind;
  Link& link = this->link(order.instance);
  const size_t pool_index = fleet_.fleet().instance(order.instance).pool;
  const FleetPool& pool = options_.fleet.pools[pool_index];
  const std::string name = absl::StrCat("instance ", order.instance.value, " of ", pool.name);
  wire::Command command;
  switch (order.action.kind) {
    case Kind::kStart:
      link.epoch = order.action.epoch;
      link.stream.reset();
      link.released = false;
      link.pids.clear();
      starter_->start({order.instance, order.action.epoch, pool.name, server_->address(), options_.token});
      return;
    case Kind::kAssign:
      log_info(name, " (process ", link.pids.front(), ") takes on its modules");
      command.mutable_assign()->set_model_dir(options_.model_dir);
      command.mutable_assign()->set_encodes_alone(!pool.generates);
      command.mutable_assign()->set_transfer_bytes(options_.feature_bytes);
      write_options(options_.engines[pool_index], *command.mutable_assign());
      return send(order.instance, std::move(command));
    case Kind::kWarm:
      command.set_warm(true);
      return send(order.instance, std::move(command));
    case Kind::kOpen:
      link.refusal = absl::OkStatus();
      return log_info(name, " is ready on ", link.device);
    case Kind::kClose:
      return log_info(name, " takes no new requests");
    case Kind::kMove:
      return;  // its requests were told
    case Kind::kFence: {
      if (link.stream.has_value()) {
        streams_.erase(*link.stream);
        server_->close(*link.stream);
      }
      fence(order.instance, order.action.epoch);
      add(past_, std::exchange(link.counts, {}));
      link.stream.reset();
      const InstanceView view = fleet_.fleet().instance(order.instance);
      if (view.state == InstanceState::kGone) return log_info(name, " is gone");
      return log_warning(name, " failed (", view.reason, "); it is started again, and its requests go on elsewhere");
    }
    case Kind::kRelease:
      link.released = true;
      command.set_release(true);
      return send(order.instance, std::move(command));
    case Kind::kKill:
      return starter_->kill(order.instance, order.action.epoch);
  }
}

}  // namespace parvl
