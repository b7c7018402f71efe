// What answers requests with tokens. Torch-free, so serving includes it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "parvl/base/status.h"
#include "parvl/exec/engine_request.h"
#include "parvl/exec/engine_stats.h"
#include "parvl/media/grammar.h"
#include "parvl/media/prompt.h"

namespace parvl {

// A loaded model that answers many requests at once.
class Engine {
 public:
  virtual ~Engine() = default;  // ends all requests

  // Read-only, any thread.
  virtual const PromptBuilder& prompts() const = 0;
  virtual int64_t max_model_len() const = 0;
  virtual int64_t max_running() const = 0;  // requests that it computes at once; more wait inside
  virtual int64_t kv_tokens() const = 0;    // whose keys and values its memory holds
  // Defaults of generation_config.json over OpenAI's; the caller overwrites what the request names.
  virtual SamplingParams default_sampling() const = 0;
  virtual std::string device_name() const = 0;
  virtual int64_t memory_bytes() const { return 0; }  // of that device, all that it may come to use, ranks included
  // Which module runs where.
  virtual std::vector<std::pair<std::string, std::string>> places() const;
  // Names, types, shapes and bytes of the keys and values of so many tokens; empty: it neither leaves nor takes any.
  virtual std::vector<TransferTensor> kv_layout(int64_t tokens) const { return {}; }
  virtual GrammarCompiler& grammars() = 0;  // of the model's tokenizer; any thread

  // Any thread. What can never run ends with InvalidArgument: too long a prompt, or an answer that had ended already.
  virtual RequestId submit(EngineRequest request) = 0;
  // Any thread. The request ends soon, with finish kNone, unless it has ended.
  virtual void cancel(RequestId id) = 0;
  // Any thread.
  virtual EngineStats stats() const = 0;

  // Any thread. Whether all of it works: else Unavailable, with the part that does not and why.
  virtual absl::Status health() const { return absl::OkStatus(); }
  // Any thread. Whether a request that is submitted now has somewhere to run.
  virtual absl::Status accepts() const { return absl::OkStatus(); }
  // Any thread. Whether one that waits may come to have: not when all that could take it is gone for good.
  virtual absl::Status will_accept() const { return absl::OkStatus(); }
  // Any thread. Likewise whether its images have, now or soon.
  virtual absl::Status accepts_images() const { return absl::OkStatus(); }
  // Of the processes that it computes with, its first rank's first; empty: this one alone.
  virtual std::vector<int64_t> pids() const { return {}; }
  // `changed` is called on any thread when max_running(), accepts() or will_accept() may have changed. Set once, before
  // a submit.
  virtual void watch_capacity(std::function<void()> changed) {}
};

}  // namespace parvl
