// What an instance with an llm_backbone does: requests from the gateway to its engine, and what comes of them back.
#pragma once

#include <absl/container/flat_hash_map.h>

#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "parvl/base/job_thread.h"
#include "parvl/comm/transfer/transfer_sink.h"
#include "parvl/exec/engine.h"
#include "parvl/serve/pools/kv_shelf.h"
#include "parvl/serve/pools/stream_client.h"

namespace parvl {

class GenerateService {
 public:
  // Sink and stream outlive it. `shelf`: of an instance whose answers go on elsewhere; else null.
  GenerateService(std::unique_ptr<Engine> engine, TransferSink& sink, StreamClient& stream,
                  std::unique_ptr<KvShelf> shelf = nullptr);
  ~GenerateService();  // ends all requests

  Engine& engine() { return *engine_; }
  // All from one thread; they do not wait.
  void generate(const wire::Generate& message);
  void cancel(const wire::Cancel& message);
  void let_go_kv(const wire::Cancel& message);
  void fence(const wire::Fence& message);

 private:
  using Attempt = KvShelf::Attempt;
  struct Live {
    std::optional<RequestId> id;   // none while it is made ready
    std::stop_source stop;         // of that
    std::shared_ptr<KvRoom> room;  // where its keys and values go; null: nowhere
  };
  class Output;  // an image's encoder output on another instance
  class Given;   // likewise keys and values
  struct Job {
    Attempt of;
    EngineRequest request;
    std::string grammar;
    std::vector<std::string> pixels;  // by image: where they lie; "": nowhere, or its output does
    bool needs_room = false;          // for what it leaves
    std::stop_token stop;
  };

  absl::Status attach_outputs(const wire::Generate& message, EngineRequest& request);
  void tell_gateway(const Attempt& of, EngineRequest& request);
  void make_ready(Job job);
  void fetch_pixels(Job job);
  void compile(Job job);
  void find_room(Job job);
  void start(Job job);
  void hand_over(const Attempt& of, wire::Said end);
  void fail(const Attempt& of, const absl::Status& status);
  void tell_if_sick(const absl::Status& status);

  TransferSink& sink_;
  StreamClient& stream_;
  const std::unique_ptr<KvShelf> shelf_;
  int failures_ = 0;  // inside, one after the other; the engine's thread
  std::mutex mutex_;
  absl::flat_hash_map<Attempt, Live> live_;
  JobThread publisher_;  // the engine hands on to it
  std::unique_ptr<Engine> engine_;
  // Seconds for each job, at worst: so that no other command waits. Each hands on to those before it.
  JobThread rooms_, compiler_, fetcher_;
};

}  // namespace parvl
