// The engine of this process: continuous batching over one executor. Torch-free.
#pragma once

#include <absl/container/flat_hash_map.h>

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "parvl/base/clock.h"
#include "parvl/exec/engine.h"
#include "parvl/exec/engine_trace.h"
#include "parvl/exec/model_executor.h"
#include "parvl/sched/record.h"

namespace parvl {

class TextStream;

struct EngineConfig {
  SchedulerConfig scheduler;
  std::shared_ptr<const PromptBuilder> prompts;
  SamplingParams default_sampling;
  std::vector<TokenId> end_tokens;
  std::string device_name;
  int64_t encoder_bytes_a_token = 0;   // of a media token's encoder output
  RecordedScheduler::Write record;     // null: nothing is recorded
  std::shared_ptr<Timeline> timeline;  // null: there is none
  EngineHooks hooks;
  std::vector<int64_t> pids;  // see Engine::pids
  int64_t memory_bytes = 0;   // see Engine::memory_bytes
  std::function<std::vector<TransferTensor>(int64_t)> kv_layout = [](int64_t) { return std::vector<TransferTensor>(); };
};

// The engine itself: one thread that schedules, hands steps to the executor and gives out what comes back.
class EngineLoop : public Engine {
 public:
  // `clock` must outlive the engine.
  EngineLoop(EngineConfig config, std::unique_ptr<ModelExecutor> executor, const Clock& clock);
  ~EngineLoop() override;

  const PromptBuilder& prompts() const override { return *config_.prompts; }
  int64_t max_model_len() const override { return config_.scheduler.max_model_len; }
  int64_t max_running() const override { return config_.scheduler.max_seqs; }
  int64_t kv_tokens() const override { return config_.scheduler.num_blocks * config_.scheduler.block_size; }
  SamplingParams default_sampling() const override { return config_.default_sampling; }
  std::string device_name() const override { return config_.device_name; }
  std::vector<TransferTensor> kv_layout(int64_t tokens) const override { return config_.kv_layout(tokens); }
  GrammarCompiler& grammars() override { return grammars_; }
  RequestId submit(EngineRequest request) override;
  void cancel(RequestId id) override;
  EngineStats stats() const override;
  absl::Status health() const override { return executor_->health(); }
  absl::Status accepts() const override { return health(); }
  std::vector<int64_t> pids() const override { return config_.pids; }
  int64_t memory_bytes() const override { return config_.memory_bytes; }

 private:
  struct Live;
  struct Command {
    RequestId id;
    EngineRequest request;  // without prompt: cancel
  };

  void loop();
  void step();
  void add(RequestId id, EngineRequest request);
  absl::Status take_up(const EngineRequest& request, TextStream& stream) const;
  void submit_step();
  void commit(const Completion& completion);
  void commit_encode(const Completion& completion);
  void commit_kv(const Completion& completion);
  void commit_step(const Completion& completion);
  void account(const Completion& completion);
  void count(WorkKind work, const Completion& completion);
  void begin_work(Live& live, double at);
  void tell_started(Live& live);
  void take_first_token(Live& live, double now);
  void deliver(RequestId id, const SampledToken& token);
  void end(RequestId id, absl::Status status);
  SchedRequest describe(RequestId id, const EngineRequest& request) const;

  EngineConfig config_;
  GrammarCompiler grammars_;
  std::unique_ptr<ModelExecutor> executor_;
  const Clock& clock_;
  RecordedScheduler scheduler_;
  absl::flat_hash_map<RequestId, std::unique_ptr<Live>> live_;
  EngineTrace trace_;
  absl::flat_hash_map<SlotId, EncodeWork> encoding_;
  std::vector<StepPart> parts_;  // of the step in flight, in its order
  bool in_flight_ = false;
  EngineStats done_;  // the engine thread's copy of stats_
  BusyTime encoder_busy_, fetch_busy_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Command> commands_;
  bool completed_ = false, stopping_ = false;  // the executor has something
  int64_t next_id_ = 1;
  EngineStats stats_;
  std::thread thread_;
};

}  // namespace parvl
