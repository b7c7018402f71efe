// Times the engine under a closed loop of clients, without HTTP: each client sends its next request when its last one
// has ended. Prompt and answer lengths are mixed. Prints one JSON object.
//
//   engine_bench MODEL_DIR DTYPE THREADS CLIENTS REQUESTS MAX_PROMPT MAX_NEW [DEVICE [--enforce-eager]]
#include <ATen/Parallel.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <iostream>
#include <mutex>

#include "bench/serve/lengths.h"
#include "parvl/base/clock.h"
#include "parvl/base/json.h"
#include "parvl/base/memory.h"
#include "parvl/exec/engine_load.h"

namespace parvl {
namespace {

class ClosedLoop {
 public:
  ClosedLoop(Engine& engine, std::vector<MixedLength> work) : engine_(engine), work_(std::move(work)) {}

  // Returns when all requests have ended.
  void run(int64_t clients) {
    for (int64_t i = 0; i < clients; ++i) send_next();
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return ended_ == work_.size(); });
  }
  const std::vector<double>& ttft_ms() const { return ttft_ms_; }
  int64_t tokens() const { return tokens_; }

 private:
  void send_next() {
    size_t index = 0;
    {
      std::lock_guard lock(mutex_);
      if (sent_ == work_.size()) return;
      index = sent_++;
    }
    const MixedLength& length = work_[index];
    auto prompt = std::make_shared<Prompt>();
    for (int64_t i = 0; i < length.prompt; ++i) prompt->ids.push_back(mixed_token(index, i));
    EngineRequest request;
    request.prompt = prompt;
    request.sampling.temperature = 0;
    request.sampling.ignore_eos = true;
    request.sampling.max_tokens = length.output;
    request.on_token = [](const TokenEvent&) {};
    request.on_end = [this](const absl::StatusOr<GenerateResult>& result) { on_end(result); };
    engine_.submit(std::move(request));
  }

  void on_end(const absl::StatusOr<GenerateResult>& result) {
    {
      std::lock_guard lock(mutex_);
      ++ended_;
      if (result.ok()) {
        tokens_ += static_cast<int64_t>(result->token_ids.size());
        ttft_ms_.push_back(result->ttft_ms);
      } else {
        std::cerr << result.status().message() << "\n";
      }
    }
    changed_.notify_all();
    send_next();
  }

  Engine& engine_;
  std::vector<MixedLength> work_;
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t sent_ = 0, ended_ = 0;
  int64_t tokens_ = 0;
  std::vector<double> ttft_ms_;
};

absl::Status run(int argc, char** argv) {
  const int64_t clients = std::stoll(argv[4]), requests = std::stoll(argv[5]);
  const int64_t max_prompt = std::stoll(argv[6]), max_new = std::stoll(argv[7]);
  at::set_num_threads(std::stoi(argv[3]));
  const RealClock clock;
  EngineOptions options;
  options.load.device = argc > 8 ? argv[8] : "cpu";
  options.enforce_eager = argc > 9;
  options.load.dtype = argv[2];
  options.max_seqs = clients;
  PARVL_ASSIGN_OR_RETURN(auto engine, load_engine(argv[1], options, clock));
  ClosedLoop(*engine, {{8, 4}}).run(1);  // warm-up
  ClosedLoop loop(*engine, mixed_lengths(requests, max_prompt, max_new));
  const double start = clock.now_seconds();
  loop.run(clients);
  const double seconds = clock.now_seconds() - start;
  std::vector<double> ttft = loop.ttft_ms();
  std::sort(ttft.begin(), ttft.end());
  const Json out = {{"requests", ttft.size()},
                    {"tokens", loop.tokens()},
                    {"tokens_s", static_cast<double>(loop.tokens()) / seconds},
                    {"ttft_ms", ttft.empty() ? 0.0 : ttft[ttft.size() / 2]},
                    {"preemptions", engine->stats().preemptions},
                    {"peak_bytes", peak_resident_bytes()}};
  std::cout << out.dump() << "\n";
  return absl::OkStatus();
}

}  // namespace
}  // namespace parvl

int main(int argc, char** argv) {
  if (argc < 8) {
    std::fprintf(
        stderr,
        "usage: engine_bench MODEL_DIR DTYPE THREADS CLIENTS REQUESTS MAX_PROMPT MAX_NEW [DEVICE [--enforce-eager]]\n");
    return 2;
  }
  parvl::tune_memory();
  const absl::Status status = parvl::catch_exceptions("engine_bench", [&] { return parvl::run(argc, argv); });
  if (!status.ok()) std::cerr << status.message() << "\n";
  return parvl::exit_code(status);
}
