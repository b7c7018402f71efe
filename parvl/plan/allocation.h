// allocation.yaml: which modules of a model run on which pools of devices, how each is cut, and the rules by which
// pools grow and shrink. Plain data, as it was written; plan/placement.h holds it against a model.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "parvl/base/config.h"
#include "parvl/base/status.h"
#include "parvl/plan/queue_kind.h"

namespace parvl {

struct DeviceClass {
  double memory_gb = 0;  // of one device, in 10^9 bytes; 0: not known
  std::string kind;      // what people call it; may be empty
};

enum class PoolRole { kEncode, kLlm, kPrefill, kDecode };
inline constexpr std::array<std::string_view, 4> kRoleNames = {"encode", "llm", "prefill", "decode"};

enum class ModuleName { kVisionEncoder, kAudioEncoder, kProjector, kBackbone };
inline constexpr std::array<std::string_view, 4> kModuleNames = {"vision_encoder", "audio_encoder", "projector",
                                                                 "llm_backbone"};

// Instances of one device class and one way to cut the modules that they hold.
struct PoolSpec {
  std::string name;
  std::string device;  // its class
  std::optional<PoolRole> role;
  int64_t min_instances = 1;
  std::optional<int64_t> max_instances, devices;
  std::map<std::string, std::string> where = {};  // "FILE:LINE: 'KEY'" of each key above
};

// One module on one pool.
struct ModuleSpec {
  ModuleName module = ModuleName::kBackbone;
  std::string pool;
  std::string parallel = "data";  // the main axis: data | tensor | pipeline | sequence | expert
  std::optional<int64_t> dp, tp, pp, sp, ep;
  std::optional<int64_t> replicas;  // instances
  std::map<std::string, std::string> where = {};
};

struct ScalingRules {
  std::string policy = "load-aware";
  double expand_threshold = 0.75, shrink_threshold = 0.30;  // shares of a pool's busy time over the window
  double cooldown_seconds = 120, window_seconds = 10, forecast_seconds = 0, drain_timeout_seconds = 30;
  bool lending = false, dry_run = false, approval = false, warmup = true;
};

struct QueueRules {
  int64_t limit = 64;
  double weight = 1;
  double deadline_ms = 0;  // 0: none
};

struct RolloutRules {
  double canary_share = 0.1, window_seconds = 60;
  std::vector<std::string> rollback_on;
};

struct Allocation {
  std::map<std::string, DeviceClass> device_classes;
  std::vector<PoolSpec> pools;      // in the file's order
  std::vector<ModuleSpec> modules;  // likewise
  ScalingRules scheduler;
  std::array<QueueRules, kQueueNames.size()> queues;
  double ttft_ms = 0, tpot_ms = 0;                  // the SLO; 0: none
  int64_t admin_port = 0;                           // 0: any
  std::string admin_host = "127.0.0.1";             // the address that it listens on
  std::map<std::string, std::string> admin_tokens;  // by role; secrets
  std::map<std::string, std::string> admin_where;   // "FILE:LINE: 'KEY'" of host and port
  RolloutRules rollout;
  std::string file;
};

// InvalidArgument naming file, line and key: an unknown key, a value out of range, a module on a pool that is not
// there, a main axis without its size, a class whose memory nobody knows.
absl::StatusOr<Allocation> read_allocation(const ConfigNode& root, const std::string& file);
absl::StatusOr<Allocation> load_allocation(const std::string& file);

}  // namespace parvl
