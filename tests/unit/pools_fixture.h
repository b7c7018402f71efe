// For tests of the gateway's engine: instances that are threads of this process and compute a text which everybody
// knows.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "parvl/serve/pools/instance_starter.h"
#include "parvl/serve/pools/pixels.h"
#include "parvl/serve/pools/worker.h"
#include "tests/unit/serve_fake.h"

namespace parvl {

inline constexpr char kToken[] = "a token of the run";
inline constexpr TokenId kEnd = 257;
inline const RealClock kClock;

// What all instances of a test share: how far each may go.
struct Script {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<int64_t> allowed = std::vector<int64_t>(4, int64_t{1} << 40);  // tokens, by instance
  absl::Status refusal, encoder_refusal;
  std::function<void()> on_load;  // called while an engine is made; null: nothing
  std::vector<int> started = std::vector<int>(4, 0), encoders = started;  // engines of both kinds, by instance
  std::vector<bool> dead = std::vector<bool>(4, false);                   // its processes end as soon as they start

  void allow(size_t instance, int64_t tokens) {
    std::lock_guard lock(mutex);
    allowed[instance] = tokens;
    changed.notify_all();
  }
  void set_dead(size_t instance, bool is) {
    std::lock_guard lock(mutex);
    dead[instance] = is;
  }
};

// Token i of an answer is the seed plus i, and plus what the encoder made of its images; the last one of max_tokens is
// the end.
std::unique_ptr<Engine> counting_engine(std::shared_ptr<Script> script, size_t instance, const std::string& folder,
                                        const EngineHooks& hooks);

// The image, with its patches where instances pull them.
std::shared_ptr<const ProcessedImage> placed(PixelStore& store, ProcessedImage image);

// Makes of an image its first value, many times.
std::unique_ptr<EncodeEngine> filling_encoder();

// "Processes" that are threads. Killing one is left to its stream, which is closed before.
class Threads : public InstanceStarter {
 public:
  Threads(std::shared_ptr<Script> script, std::string folder)
      : script_(std::move(script)), folder_(std::move(folder)) {}
  ~Threads() override;
  void set_on_exit(OnExit on_exit) override { on_exit_ = std::move(on_exit); }
  void start(const InstanceLaunch& launch) override;
  void kill(InstanceId, int64_t) override {}
  void die(InstanceId instance, int64_t epoch) { on_exit_(instance, epoch, "was killed"); }
  const std::string& gateway() const { return gateway_; }

 private:
  const std::shared_ptr<Script> script_;
  const std::string folder_;
  std::string gateway_;
  OnExit on_exit_;
  std::list<std::thread> threads_;
};

}  // namespace parvl
