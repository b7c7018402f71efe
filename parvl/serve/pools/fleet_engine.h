// An engine that is many: requests go to instances in other processes, which elastic/fleet.h chooses, and go on
// elsewhere when one is lost. One thread decides; gRPC's and the callers' only bring it events.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "parvl/serve/pools/fleet_options.h"
#include "parvl/serve/pools/instance_starter.h"
#include "parvl/serve/pools/instance_status.h"
#include "parvl/serve/pools/stream_id.h"

namespace parvl {

class StreamServer;
namespace wire {  // proto/instance.proto, whose headers do not go together with libtorch's
class Command;
class Encoded;
class Ended;
class Failure;
class FromInstance;
class Said;
class Token;
}  // namespace wire

class FleetEngine : public Engine {
 public:
  // Starts every instance and blocks until all are ready. The error of one that refuses its modules, or whose process
  // ends again and again before it is ready. `clock` must outlive it.
  static absl::StatusOr<std::unique_ptr<FleetEngine>> start(FleetOptions options,
                                                            std::unique_ptr<InstanceStarter> starter,
                                                            const Clock& clock);
  ~FleetEngine() override;

  const PromptBuilder& prompts() const override { return *options_.front.prompts; }
  int64_t max_model_len() const override { return options_.front.max_model_len; }
  int64_t max_running() const override;  // of the instances that are ready now
  int64_t kv_tokens() const override;    // likewise
  SamplingParams default_sampling() const override { return options_.front.sampling; }
  std::string device_name() const override;
  std::vector<std::pair<std::string, std::string>> places() const override;  // as pools and instances
  GrammarCompiler& grammars() override { return *grammars_; }
  // Its images lie in FleetOptions::pixels.
  RequestId submit(EngineRequest request) override;
  void cancel(RequestId id) override;
  EngineStats stats() const override;  // of all instances together, those that are gone included
  absl::Status health() const override;
  absl::Status accepts() const override;
  absl::Status will_accept() const override;
  absl::Status accepts_images() const override;
  void watch_capacity(std::function<void()> changed) override;

  std::vector<InstanceStatus> instances() const;   // any thread
  std::vector<EngineStats> stats_by_pool() const;  // any thread; those that are gone included
  // Any thread. Pieces of requests that wait for an instance: images to be encoded, or generations.
  int64_t parked(bool encodings) const;
  // Any thread. The instance takes no new requests, and ends when those it has are done or moved.
  void drain(InstanceId id);

 private:
  struct Live;
  struct Link;
  using Task = std::function<void()>;

  FleetEngine(FleetOptions options, std::unique_ptr<InstanceStarter> starter, const Clock& clock);
  absl::Status wait_ready();
  void loop();
  void post(Task task);
  void publish();
  InstanceStatus status_of(InstanceId id);
  double now() const { return clock_.now_seconds(); }

  void take(StreamId stream, const wire::FromInstance& message);
  void take_said(InstanceId id, int64_t epoch, const wire::Said& said);
  void take_token(InstanceId id, const wire::Token& token);
  void take_end(InstanceId id, const wire::Ended& ended);
  void take_encoded(InstanceId id, const wire::Encoded& encoded);
  bool attach(StreamId stream, InstanceId id, const wire::FromInstance& message);
  void lost_stream(StreamId stream);

  void act(const Fleet::Actions& actions);
  void act(const InstanceOrder& order);
  void act(const RequestOrder& order);
  void encode(const RequestOrder& order, Live& live);
  void generate(const RequestOrder& order, Live& live);
  void let_go(const RequestOrder& order);
  void deliver(Live& live);
  std::string places_text(const std::vector<InstanceId>& instances) const;
  Link& link(InstanceId id);
  void end(RequestId id, const absl::Status& status);
  void send(InstanceId id, wire::Command command);
  void assign(InstanceId id, const EngineOptions& engine, int64_t adds);
  void fence(InstanceId id, int64_t epoch);
  std::string name_of(InstanceId id) const;

  const FleetOptions options_;
  std::optional<size_t> encoders_;  // the pool whose instances encode and do nothing else; none: images have no own
  const Clock& clock_;
  std::unique_ptr<GrammarCompiler> grammars_;
  std::unique_ptr<InstanceStarter> starter_;
  std::unique_ptr<StreamServer> server_;

  // The thread's.
  RecordedFleet fleet_;
  std::vector<Link> links_;  // by instance
  std::map<StreamId, InstanceId> streams_;
  std::map<RequestId, std::unique_ptr<Live>> live_;
  std::optional<TokenEvent> token_;  // that is being delivered
  std::vector<EngineStats> past_;    // by pool, of processes that are gone
  std::set<InstanceId> touched_;     // whose state may have changed since it was published

  struct Snapshot {
    std::vector<InstanceStatus> instances;
    std::vector<EngineStats> by_pool;
    EngineStats stats;
    absl::Status health = absl::UnavailableError("no instance has started yet"), accepts = health, accepts_images,
                 will_accept;
    int64_t capacity = 0, kv_tokens = 0, parked_encodings = 0, parked_generations = 0;
  };
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  std::map<RequestId, std::unique_ptr<Live>> submitted_;  // that the thread has not taken up yet
  bool stopping_ = false;
  int64_t next_id_ = 1;
  Snapshot published_;
  std::function<void()> capacity_changed_;
  std::thread thread_;
};

}  // namespace parvl
