#include "parvl/serve/pools/worker.h"

#include <absl/container/flat_hash_map.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <stop_token>
#include <thread>
#include <utility>

#include "parvl/base/log.h"
#include "parvl/serve/pools/stream_client.h"
#include "parvl/serve/pools/wire.h"
#include "parvl/serve/warm_up.h"

namespace parvl {
namespace {

constexpr std::chrono::milliseconds kSignOfLife{500};

// A request's try on this instance.
struct Attempt {
  int64_t request = 0;
  int32_t attempt = 0;
  friend bool operator==(const Attempt&, const Attempt&) = default;
  template <typename H>
  friend H AbslHashValue(H state, const Attempt& a) {
    return H::combine(std::move(state), a.request, a.attempt);
  }
};

wire::Said ended(const Attempt& of, const absl::StatusOr<GenerateResult>& result) {
  wire::Said said;
  said.mutable_ended()->set_request(of.request);
  said.mutable_ended()->set_attempt(of.attempt);
  write_result(result, *said.mutable_ended());
  return said;
}

class Worker {
 public:
  Worker(const WorkerOptions& options, const EngineLoader& load) : options_(options), load_(load) {}

  absl::Status run() {
    stream_ = StreamClient::attach(options_.gateway, options_.token, options_.instance, options_.epoch,
                                   {.message = [this](const wire::ToInstance& message) { take(message); },
                                    .closed = [this](const absl::Status& why) { close(why); }});
    wire::Said hello;
    hello.mutable_hello()->set_pid(::getpid());
    stream_->add(std::move(hello));
    stream_->flush();
    const std::jthread alive([this](const std::stop_token& stop) { show_life(stop); });
    const std::jthread compiler([this](const std::stop_token& stop) { compile_grammars(stop); });
    for (;;) {
      std::deque<wire::Command> commands;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return gone_.has_value() || !commands_.empty(); });
        if (gone_.has_value()) return *gone_;
        commands.swap(commands_);
      }
      for (wire::Command& command : commands) {
        if (command.release()) return absl::OkStatus();
        if (command.has_assign()) PARVL_RETURN_IF_ERROR(take_on(command.assign()));
        if (command.warm()) PARVL_RETURN_IF_ERROR(warm());
        if (command.has_generate()) generate(command.generate());
        if (command.has_cancel()) cancel({command.cancel().request(), command.cancel().attempt()});
      }
    }
  }

 private:
  struct Live {
    std::optional<RequestId> id;  // none while its grammar is compiled
    std::stop_source stop;        // of that
  };
  struct Compilation {
    Attempt of;
    EngineRequest request;
    std::string source;
    std::stop_token stop;
  };

  void take(const wire::ToInstance& message) {
    {
      std::lock_guard lock(mutex_);
      for (const wire::Command& command : message.commands()) commands_.push_back(command);
    }
    changed_.notify_all();
  }

  // A worker that nobody listens to must not go on: whatever it is in the middle of.
  void close(const absl::Status& why) {
    const absl::Status gone = absl::UnavailableError("the gateway is gone: " + std::string(why.message()));
    {
      std::lock_guard lock(mutex_);
      gone_ = gone;
    }
    changed_.notify_all();
    if (options_.on_gone) options_.on_gone(gone);
  }

  void show_life(const std::stop_token& stop) {
    std::mutex own;
    std::condition_variable_any never;
    std::unique_lock lock(own);
    while (!never.wait_for(lock, stop, kSignOfLife, [&] { return stop.stop_requested(); })) {
      wire::Said said;
      said.set_alive(true);
      stream_->add(std::move(said));
      stream_->flush();
    }
  }

  absl::Status refuse(const absl::Status& status) {
    wire::Said said;
    write_failure(status, *said.mutable_refused());
    stream_->add(std::move(said));
    stream_->flush();
    // The gateway, which now knows why, ends this process; it need not be told by an exit code.
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return gone_.has_value(); });
    return status;
  }

  absl::Status take_on(const wire::Assign& assign) {
    EngineOptions options = read_options(assign);
    options.hooks.on_submit = [this](int64_t tokens) {
      wire::Said said;
      said.mutable_step_began()->set_size(tokens);
      stream_->add(std::move(said));
    };
    options.hooks.on_step = [this](const EngineStep& step) {
      wire::Said said;
      said.mutable_step_ended()->set_size(step.tokens);
      said.mutable_step_ended()->set_seconds(step.seconds);
      stream_->add(std::move(said));
    };
    options.hooks.on_turn = [this] {
      if (!counting_.load()) return stream_->flush();
      wire::Counts counts;
      write_stats(engine_->stats(), counts);
      stream_->flush(counts);
    };
    auto engine = load_(assign.model_dir(), options);
    if (!engine.ok()) return refuse(engine.status());
    engine_ = *std::move(engine);
    counting_ = true;
    wire::Said said;
    said.mutable_loaded()->set_max_running(engine_->max_running());
    said.mutable_loaded()->set_kv_tokens(engine_->kv_tokens());
    said.mutable_loaded()->set_device(engine_->device_name());
    stream_->add(std::move(said));
    stream_->flush();
    return absl::OkStatus();
  }

  absl::Status warm() {
    if (const absl::Status status = warm_up(*engine_); !status.ok()) return refuse(status);
    wire::Said said;
    said.set_warmed(true);
    stream_->add(std::move(said));
    stream_->flush();
    return absl::OkStatus();
  }

  void fail(const Attempt& of, const absl::Status& status) {
    stream_->add(ended(of, status));
    stream_->flush();
  }

  void generate(const wire::Generate& message) {
    const Attempt of{message.request(), message.attempt()};
    if (engine_ == nullptr) return fail(of, absl::UnavailableError("the instance has no model"));
    auto request = read_request(message);
    if (!request.ok()) return fail(of, request.status());
    tell_gateway(of, *request);
    std::lock_guard lock(live_mutex_);
    Live& live = live_[of];
    if (message.grammar().empty()) {
      live.id = engine_->submit(*std::move(request));
      return;
    }
    {
      std::lock_guard compiling(mutex_);
      compilations_.push_back({of, *std::move(request), message.grammar(), live.stop.get_token()});
    }
    changed_.notify_all();
  }

  // Its last token and its end are one thing to say: nobody may take an answer for cut that was whole.
  void tell_gateway(const Attempt& of, EngineRequest& request) {
    auto last = std::make_shared<std::optional<wire::Said>>();
    request.on_token = [this, of, last](const TokenEvent& event) {
      wire::Said said;
      said.mutable_token()->set_request(of.request);
      said.mutable_token()->set_attempt(of.attempt);
      write_token(event, *said.mutable_token());
      if (event.finish == FinishReason::kNone) {
        stream_->add(std::move(said));
      } else {
        *last = std::move(said);
      }
    };
    request.on_end = [this, of, last](const absl::StatusOr<GenerateResult>& result) {
      if (last->has_value()) {
        stream_->add({**last, ended(of, result)});
      } else {
        stream_->add(ended(of, result));
      }
      std::lock_guard lock(live_mutex_);
      live_.erase(of);
    };
  }

  void cancel(const Attempt& of) {
    std::lock_guard lock(live_mutex_);
    const auto found = live_.find(of);
    if (found == live_.end()) return;
    found->second.stop.request_stop();
    if (found->second.id.has_value()) engine_->cancel(*found->second.id);
  }

  // Seconds each, at worst: on a thread of its own, so that nobody else's command waits for it.
  void compile_grammars(const std::stop_token& stop) {
    for (;;) {
      std::optional<Compilation> next;
      {
        std::unique_lock lock(mutex_);
        if (!changed_.wait(lock, stop, [this] { return !compilations_.empty(); })) return;
        next = std::move(compilations_.front());
        compilations_.pop_front();
      }
      auto grammar = engine_->grammars().compile(next->source, next->stop);
      std::lock_guard lock(live_mutex_);
      if (next->stop.stop_requested() || !grammar.ok()) {
        live_.erase(next->of);
        fail(next->of, next->stop.stop_requested() ? absl::CancelledError("cancelled") : grammar.status());
        continue;
      }
      next->request.grammar = *std::move(grammar);
      live_[next->of].id = engine_->submit(std::move(next->request));
    }
  }

  const WorkerOptions& options_;
  const EngineLoader& load_;
  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::deque<wire::Command> commands_;
  std::deque<Compilation> compilations_;
  std::optional<absl::Status> gone_;
  std::mutex live_mutex_;  // may be held while mutex_ is taken
  absl::flat_hash_map<Attempt, Live> live_;
  std::atomic<bool> counting_ = false;
  std::unique_ptr<StreamClient> stream_;
  std::unique_ptr<Engine> engine_;  // first to go: its callbacks use all of the above
};

}  // namespace

absl::Status run_worker(const WorkerOptions& options, const EngineLoader& load) { return Worker(options, load).run(); }

}  // namespace parvl
