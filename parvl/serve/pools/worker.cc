#include "parvl/serve/pools/worker.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <stop_token>
#include <thread>
#include <utility>

#include "parvl/elastic/instance_id.h"
#include "parvl/serve/pools/encode_service.h"
#include "parvl/serve/pools/generate_service.h"
#include "parvl/serve/pools/stream_client.h"
#include "parvl/serve/pools/wire.h"
#include "parvl/serve/warm_up.h"

namespace parvl {
namespace {

constexpr std::chrono::milliseconds kSignOfLife{500};

class Worker {
 public:
  Worker(const WorkerOptions& options, const WorkerLoaders& loaders, const Clock& clock)
      : options_(options), loaders_(loaders), clock_(clock) {}

  absl::Status run() {
    TransferSinkOptions sink;
    sink.name = instance_name(InstanceId{options_.instance});
    sink.epoch = options_.epoch;
    sink.token = options_.token;
    sink.clock = &clock_;
    PARVL_ASSIGN_OR_RETURN(sink_, TransferSink::start(sink));
    stream_ = StreamClient::attach(options_.gateway, options_.token, options_.instance, options_.epoch,
                                   {.message = [this](const wire::ToInstance& message) { take(message); },
                                    .closed = [this](const absl::Status& why) { close(why); }});
    wire::Said hello;
    hello.mutable_hello()->set_pid(::getpid());
    say(std::move(hello));
    const std::jthread alive([this](const std::stop_token& stop) { show_life(stop); });
    for (;;) {
      std::deque<wire::Command> commands;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return gone_.has_value() || !commands_.empty(); });
        if (gone_.has_value()) return *gone_;
        commands.swap(commands_);
      }
      for (const wire::Command& command : commands) {
        if (command.release()) {
          released_ = true;  // that the stream ends now is no news
          return absl::OkStatus();
        }
        PARVL_RETURN_IF_ERROR(obey(command));
      }
    }
  }

 private:
  absl::Status obey(const wire::Command& command) {
    if (command.has_assign()) return or_refuse(take_on(command.assign()));
    if (command.warm()) return or_refuse(warm());
    if (generates_ != nullptr) {
      if (command.has_generate()) generates_->generate(command.generate());
      if (command.has_cancel()) generates_->cancel(command.cancel());
    }
    if (encodes_ != nullptr) {
      if (command.has_encode()) encodes_->encode(command.encode());
      if (command.has_let_go()) encodes_->let_go(command.let_go());
      if (command.has_fence()) encodes_->fence(command.fence());
    }
    return absl::OkStatus();
  }

  void take(const wire::ToInstance& message) {
    {
      std::lock_guard lock(mutex_);
      for (const wire::Command& command : message.commands()) commands_.push_back(command);
    }
    changed_.notify_all();
  }

  // A worker that nobody listens to must not go on, whatever it is in the middle of.
  void close(const absl::Status& why) {
    const absl::Status gone = absl::UnavailableError("the gateway is gone: " + std::string(why.message()));
    {
      std::lock_guard lock(mutex_);
      gone_ = gone;
    }
    changed_.notify_all();
    if (options_.on_gone && !released_) options_.on_gone(gone);
  }

  void say(wire::Said said) {
    stream_->add(std::move(said));
    stream_->flush();
  }

  void show_life(const std::stop_token& stop) {
    std::mutex own;
    std::condition_variable_any never;
    std::unique_lock lock(own);
    while (!never.wait_for(lock, stop, kSignOfLife, [&] { return stop.stop_requested(); })) {
      wire::Said said;
      said.set_alive(true);
      say(std::move(said));
    }
  }

  // The gateway, once it knows why, ends this process; it need not be told by an exit code.
  absl::Status or_refuse(const absl::Status& status) {
    if (status.ok()) return status;
    wire::Said said;
    write_failure(status, *said.mutable_refused());
    say(std::move(said));
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return gone_.has_value(); });
    return status;
  }

  EngineHooks hooks() {
    EngineHooks out;
    out.on_submit = [this](int64_t size) {
      wire::Said said;
      said.mutable_step_began()->set_size(size);
      stream_->add(std::move(said));
    };
    out.on_step = [this](const EngineStep& step) {
      wire::Said said;
      said.mutable_step_ended()->set_size(step.tokens);
      said.mutable_step_ended()->set_seconds(step.seconds);
      stream_->add(std::move(said));
    };
    out.on_turn = [this] { tell_counts(); };
    return out;
  }

  void tell_counts() {
    wire::Counts counts;
    if (!ready_) return stream_->flush();
    if (generates_ != nullptr) write_stats(generates_->engine().stats(), counts);
    if (encodes_ != nullptr) {
      const EncodeStats stats = encodes_->engine().stats();
      EngineStats as_engine;
      as_engine.running = stats.images - stats.waiting;
      as_engine.waiting = stats.waiting;
      as_engine.encoder_busy_s = stats.busy_s;
      as_engine.work[static_cast<size_t>(WorkKind::kEncode)] = stats.work;
      write_stats(as_engine, counts);
    }
    stream_->flush(counts);
  }

  absl::Status take_on(const wire::Assign& assign) {
    EngineOptions options = read_options(assign);
    options.hooks = hooks();
    model_dir_ = assign.model_dir();
    wire::Said said;
    wire::Loaded& loaded = *said.mutable_loaded();
    if (assign.encodes_alone()) {
      PARVL_ASSIGN_OR_RETURN(auto engine, loaders_.encoder(assign.model_dir(), options));
      TransferSourceOptions source;
      source.name = instance_name(InstanceId{options_.instance});
      source.epoch = options_.epoch;
      source.token = options_.token;
      source.clock = &clock_;
      source.arena_bytes = assign.transfer_bytes();
      PARVL_ASSIGN_OR_RETURN(auto outputs, TransferSource::start(source));
      loaded.set_max_running(engine->max_images());
      loaded.set_device(engine->device_name());
      encodes_ = std::make_unique<EncodeService>(std::move(engine), std::move(outputs), *sink_, *stream_);
    } else {
      PARVL_ASSIGN_OR_RETURN(auto engine, loaders_.engine(assign.model_dir(), options));
      loaded.set_max_running(engine->max_running());
      loaded.set_kv_tokens(engine->kv_tokens());
      for (const int64_t pid : engine->pids()) loaded.add_pids(pid);
      loaded.set_device(engine->device_name());
      const auto& modules = assign.modules();
      holds_encoder_ = modules.empty() || std::find(modules.begin(), modules.end(), "vision_encoder") != modules.end();
      generates_ = std::make_unique<GenerateService>(std::move(engine), *sink_, *stream_);
    }
    ready_ = true;
    say(std::move(said));
    return absl::OkStatus();
  }

  absl::Status warm() {
    if (generates_ != nullptr) {
      PARVL_RETURN_IF_ERROR(warm_up(generates_->engine(), holds_encoder_));
    } else if (encodes_ != nullptr) {
      PARVL_RETURN_IF_ERROR(warm_up(encodes_->engine(), model_dir_));
    }
    wire::Said said;
    said.set_warmed(true);
    say(std::move(said));
    return absl::OkStatus();
  }

  const WorkerOptions& options_;
  const WorkerLoaders& loaders_;
  const Clock& clock_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<wire::Command> commands_;
  std::optional<absl::Status> gone_;
  std::atomic<bool> released_ = false;
  std::atomic<bool> ready_ = false;  // one of the services is there
  bool holds_encoder_ = false;
  std::string model_dir_;
  std::unique_ptr<TransferSink> sink_;
  std::unique_ptr<StreamClient> stream_;
  std::unique_ptr<GenerateService> generates_;
  std::unique_ptr<EncodeService> encodes_;
};

}  // namespace

absl::Status run_worker(const WorkerOptions& options, const WorkerLoaders& loaders, const Clock& clock) {
  return Worker(options, loaders, clock).run();
}

}  // namespace parvl
