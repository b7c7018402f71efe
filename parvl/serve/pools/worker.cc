#include "parvl/serve/pools/worker.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <limits>
#include <mutex>
#include <optional>
#include <stop_token>
#include <thread>
#include <utility>

#include "parvl/base/fingerprint.h"
#include "parvl/base/job_thread.h"
#include "parvl/base/memory.h"
#include "parvl/base/shared_block.h"
#include "parvl/elastic/instance_id.h"
#include "parvl/serve/pools/encode_service.h"
#include "parvl/serve/pools/generate_service.h"
#include "parvl/serve/pools/stream_client.h"
#include "parvl/serve/pools/wire.h"
#include "parvl/serve/warm_up.h"

namespace parvl {
namespace {

constexpr std::chrono::milliseconds kSignOfLife{500};
constexpr int64_t kPage = 4096;

// Answers that move between instances must come of the same weights. Asked before they are read and after, since that
// takes its time.
absl::Status check_model(const wire::Assign& assign) {
  PARVL_ASSIGN_OR_RETURN(const std::string found, fingerprint_model(assign.model_dir()));
  if (found == assign.fingerprint()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("the files of ", assign.model_dir(),
                                                    " have changed since the server started, and instances with "
                                                    "different weights must not share requests; restart the server"));
}

class Worker {
 public:
  Worker(const WorkerOptions& options, const WorkerLoaders& loaders, const Clock& clock)
      : options_(options), loaders_(loaders), clock_(clock) {}
  // The threads of both services look at both: the encoder goes while the other is there, and leaves nothing to look
  // at.
  ~Worker() {
    adding_.reset();
    give_back();
  }

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
    if (command.has_assign() && command.assign().adds() != 0) {
      adding_->submit([this, assign = command.assign()] { tell_added(assign.adds(), add_encoder(assign)); });
      return absl::OkStatus();
    }
    if (command.give_back()) {
      adding_->submit([this] { give_back(); });
      return absl::OkStatus();
    }
    if (command.has_assign()) return or_refuse(take_on(command.assign()));
    if (command.warm()) return or_refuse(warm());
    if (generates_ != nullptr) {
      if (command.has_generate()) generates_->generate(command.generate());
      if (command.has_cancel()) generates_->cancel(command.cancel());
      if (command.has_let_go_kv()) generates_->let_go_kv(command.let_go_kv());
      if (command.has_fence()) generates_->fence(command.fence());
    }
    std::lock_guard lock(encoder_mutex_);
    if (encodes_ != nullptr) {
      if (command.has_encode()) encodes_->encode(command.encode());
      if (command.has_let_go()) encodes_->let_go(command.let_go());
      if (command.has_fence()) encodes_->fence(command.fence());
    } else if (command.has_encode()) {
      refuse_image(command.encode());
    }
    return absl::OkStatus();
  }

  // It was given back meanwhile: somebody else will do it.
  void refuse_image(const wire::Encode& message) {
    wire::Said said;
    wire::Encoded& encoded = *said.mutable_encoded();
    encoded.set_request(message.request());
    encoded.set_item(message.item());
    encoded.set_attempt(message.attempt());
    write_failure(absl::UnavailableError("this instance holds no vision encoder"), *encoded.mutable_failure());
    say(std::move(said));
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

  void began(int64_t size, bool encodes) {
    wire::Said said;
    said.mutable_step_began()->set_size(size);
    said.mutable_step_began()->set_encodes(encodes);
    stream_->add(std::move(said));
  }
  void ended(int64_t size, double seconds, bool encodes) {
    wire::Said said;
    said.mutable_step_ended()->set_size(size);
    said.mutable_step_ended()->set_seconds(seconds);
    said.mutable_step_ended()->set_encodes(encodes);
    stream_->add(std::move(said));
  }

  EngineHooks hooks() {
    EngineHooks out;
    out.on_submit = [this](int64_t size) { began(size, false); };
    out.on_step = [this](const EngineStep& step) { ended(step.tokens, step.seconds, false); };
    out.on_encode = [this](int64_t patches) { began(patches, true); };
    out.on_encoded = [this](int64_t patches, double seconds) { ended(patches, seconds, true); };
    out.on_turn = [this] { tell_counts(); };
    return out;
  }

  // What both engines count, those encoders included that were given back.
  void tell_counts() {
    wire::Counts counts;
    if (!ready_) return stream_->flush();
    EngineStats stats;
    if (generates_ != nullptr) stats = generates_->engine().stats();
    {
      std::lock_guard lock(encoder_mutex_);
      EncodeStats encodes;
      if (encodes_ != nullptr) encodes = encodes_->engine().stats();
      stats.running += encodes.images - encodes.waiting;
      stats.waiting += encodes.waiting;
      for (const EncodeStats* one : {&given_back_, &encodes}) {
        WorkCount& work = stats.work[static_cast<size_t>(WorkKind::kEncode)];
        stats.encoder_busy_s += one->busy_s;
        work.replayed += one->work.replayed;
        work.launched += one->work.launched;
      }
    }
    write_stats(stats, counts);
    stream_->flush(counts);
  }

  absl::StatusOr<std::unique_ptr<TransferSource>> make_source(const std::string& name, int64_t bytes) const {
    TransferSourceOptions source;
    source.name = name;
    source.epoch = options_.epoch;
    source.token = options_.token;
    source.clock = &clock_;
    source.arena_bytes = bytes;
    return TransferSource::start(source);
  }

  // With room for two of the longest prompts at least, so that one is computed while another is taken. Memory is given
  // out in pieces of up to an eighth and a page more.
  absl::StatusOr<std::unique_ptr<KvShelf>> make_shelf(const Engine& engine, int64_t bytes) const {
    int64_t longest = 0;
    for (const TransferTensor& tensor : engine.kv_layout(engine.max_model_len())) longest += tensor.bytes;
    if (longest == 0) return absl::UnimplementedError("an LLM over several devices hands nothing over yet");
    PARVL_ASSIGN_OR_RETURN(auto source, make_source(instance_name(InstanceId{options_.instance}),
                                                    std::max(bytes, 2 * (longest + longest / 8 + kPage))));
    return std::make_unique<KvShelf>(std::move(source));
  }

  absl::StatusOr<std::unique_ptr<EncodeService>> make_encoder(std::unique_ptr<EncodeEngine> engine,
                                                              const std::string& name, int64_t bytes) {
    PARVL_ASSIGN_OR_RETURN(auto outputs, make_source(name, bytes));
    return std::make_unique<EncodeService>(std::move(engine), std::move(outputs), *sink_, *stream_);
  }

  // Memory that its engine was promised is not there for the encoder, whether it was used already or not. What its
  // weights lie in already is no more needed.
  int64_t room_for_encoder(const EngineOptions& options) const {
    const int64_t promised = generates_->engine().memory_bytes();
    int64_t room = std::numeric_limits<int64_t>::max();
    if (options.load.memory_limit_bytes > 0) room = options.load.memory_limit_bytes - promised;
    if (options.load.device == "cpu") {
      const int64_t free = available_bytes() - std::max<int64_t>(0, promised - resident_bytes());
      room = std::min(room, free + shared_bytes(options.load.shared_weights));
    }
    return std::max<int64_t>(1, room);
  }

  // The rest is on the adding thread, one after the other.
  absl::Status add_encoder(const wire::Assign& assign) {
    if (generates_ == nullptr) return absl::FailedPreconditionError("there is nothing here to add the encoder to");
    {
      std::lock_guard lock(encoder_mutex_);
      if (encodes_ != nullptr) return absl::FailedPreconditionError("the encoder is here already");
    }
    EngineOptions options = read_options(assign);
    options.hooks = hooks();
    options.load.memory_limit_bytes = room_for_encoder(options);
    PARVL_RETURN_IF_ERROR(check_model(assign));
    PARVL_ASSIGN_OR_RETURN(auto engine, loaders_.encoder(assign.model_dir(), options));
    PARVL_RETURN_IF_ERROR(check_model(assign));
    PARVL_RETURN_IF_ERROR(warm_up(*engine, assign.model_dir()));
    // No two sources of a process have the same name.
    const std::string name = absl::StrCat(instance_name(InstanceId{options_.instance}), "-added-", ++added_);
    PARVL_ASSIGN_OR_RETURN(auto service, make_encoder(std::move(engine), name, assign.transfer_bytes()));
    std::lock_guard lock(encoder_mutex_);
    encodes_ = std::move(service);
    return absl::OkStatus();
  }

  void tell_added(int64_t number, const absl::Status& status) {
    wire::Said said;
    said.mutable_added()->set_number(number);
    write_failure(status, *said.mutable_added()->mutable_failure());
    say(std::move(said));
  }

  void give_back() {
    std::unique_ptr<EncodeService> service;
    {
      std::lock_guard lock(encoder_mutex_);
      if (encodes_ == nullptr) return;
      const EncodeStats stats = encodes_->engine().stats();
      given_back_.busy_s += stats.busy_s;
      given_back_.work.replayed += stats.work.replayed;
      given_back_.work.launched += stats.work.launched;
      service = std::move(encodes_);
    }
    service.reset();  // without the mutex, which its threads take
  }

  absl::Status take_on(const wire::Assign& assign) {
    EngineOptions options = read_options(assign);
    options.hooks = hooks();
    model_dir_ = assign.model_dir();
    PARVL_RETURN_IF_ERROR(check_model(assign));
    wire::Said said;
    wire::Loaded& loaded = *said.mutable_loaded();
    if (assign.encodes_alone()) {
      PARVL_ASSIGN_OR_RETURN(auto engine, loaders_.encoder(assign.model_dir(), options));
      loaded.set_max_running(engine->max_images());
      loaded.set_device(engine->device_name());
      const std::string name = instance_name(InstanceId{options_.instance});
      PARVL_ASSIGN_OR_RETURN(auto service, make_encoder(std::move(engine), name, assign.transfer_bytes()));
      std::lock_guard lock(encoder_mutex_);
      encodes_ = std::move(service);
    } else {
      PARVL_ASSIGN_OR_RETURN(auto engine, loaders_.engine(assign.model_dir(), options));
      loaded.set_max_running(engine->max_running());
      loaded.set_kv_tokens(engine->kv_tokens());
      for (const int64_t pid : engine->pids()) loaded.add_pids(pid);
      loaded.set_device(engine->device_name());
      const auto& modules = assign.modules();
      holds_encoder_ = modules.empty() || std::find(modules.begin(), modules.end(), "vision_encoder") != modules.end();
      std::unique_ptr<KvShelf> shelf;
      if (assign.hands_over()) {
        PARVL_ASSIGN_OR_RETURN(shelf, make_shelf(*engine, assign.transfer_bytes()));
      }
      generates_ = std::make_unique<GenerateService>(std::move(engine), *sink_, *stream_, std::move(shelf));
    }
    PARVL_RETURN_IF_ERROR(check_model(assign));
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
  std::mutex encoder_mutex_;
  std::unique_ptr<EncodeService> encodes_;
  EncodeStats given_back_;
  int64_t added_ = 0;                           // encoders so far, beside the engine
  std::unique_ptr<GenerateService> generates_;  // after what its engine's thread looks at
  // What takes seconds, while the engine goes on; last: it uses all of the above.
  std::optional<JobThread> adding_{std::in_place};
};

}  // namespace

absl::Status run_worker(const WorkerOptions& options, const WorkerLoaders& loaders, const Clock& clock) {
  return Worker(options, loaders, clock).run();
}

}  // namespace parvl
