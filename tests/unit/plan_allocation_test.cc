#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "parvl/base/file.h"
#include "parvl/plan/allocation.h"
#include "parvl/plan/placement.h"
#include "parvl/plan/placement_text.h"

namespace parvl {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// The contract's example, word for word.
const std::string kExample = read_file(std::string(PARVL_SOURCE_DIR) + "/examples/allocation.yaml").value_or("");

absl::StatusOr<Allocation> read(const std::string& text) {
  PARVL_ASSIGN_OR_RETURN(const ConfigNode root, parse_config(text, "a.yaml"));
  return read_allocation(root, "a.yaml");
}

ModelSpec vlm() {
  ModelSpec spec;
  spec.family = Family::kQwen2Vl;
  spec.model_type = "qwen2_vl";
  spec.backbone.layers = 4;
  spec.backbone.hidden = 192;
  spec.backbone.heads = 12;
  spec.backbone.kv_heads = 4;
  spec.backbone.head_dim = 16;
  spec.backbone.intermediate = 512;
  spec.backbone.vocab = 384;
  spec.backbone.max_positions = 1024;
  spec.vision.emplace();
  spec.vision->layers = 2;
  spec.vision->hidden = 192;
  spec.vision->heads = 4;
  spec.vision->intermediate = 768;
  return spec;
}

ModelSpec text_model() {
  ModelSpec spec = vlm();
  spec.model_type = "qwen2";
  spec.vision.reset();
  return spec;
}

absl::StatusOr<PlacementPlan> plan(const std::string& text, const ModelSpec& spec = vlm()) {
  PARVL_ASSIGN_OR_RETURN(const Allocation allocation, read(text));
  return place(allocation, spec, DType::kFloat32);
}

std::string error(const std::string& text, const ModelSpec& spec = vlm()) {
  return std::string(plan(text, spec).status().message());
}

// A file with these pools and modules.
std::string file(const std::string& pools, const std::string& modules, const std::string& rest = "") {
  return "cluster: {gpu_pools: {" + pools + "}}\nmodel:\n  modules: {" + modules + "}\n" + rest;
}
const std::string kPool = "p: {device: cpu}", kLlm = "llm_backbone: {pool: p}";

TEST(Allocation, TheExampleLoadsAsItIs) {
  const auto allocation = read(kExample);
  ASSERT_TRUE(allocation.ok()) << allocation.status();
  EXPECT_EQ(allocation->device_classes.at("gpu-24gb").memory_gb, 24);
  EXPECT_EQ(allocation->device_classes.at("gpu-40gb").memory_gb, 40);
  const auto plan = place(*allocation, vlm(), DType::kFloat32);
  ASSERT_TRUE(plan.ok()) << plan.status();
  ASSERT_EQ(plan->pools.size(), 2u);
  const PoolPlan &encoders = plan->pools[0], &llms = plan->pools[1];
  EXPECT_EQ(encoders.role, PoolRole::kEncode);
  EXPECT_EQ(encoders.instances, 2);
  EXPECT_EQ(encoders.devices_an_instance, 1);
  EXPECT_EQ(encoders.devices, 8);
  ASSERT_EQ(encoders.modules.size(), 2u);
  EXPECT_EQ(encoders.modules[0].module, ModuleName::kVisionEncoder);
  EXPECT_EQ(encoders.modules[1].module, ModuleName::kProjector) << "the projector follows the vision encoder";
  EXPECT_EQ(llms.role, PoolRole::kLlm);
  EXPECT_EQ(llms.instances, 2);
  EXPECT_EQ(llms.devices_an_instance, 2);
  EXPECT_EQ(llms.devices, 16);
  ASSERT_EQ(llms.modules.size(), 1u);
  EXPECT_EQ(llms.modules[0].layout.tp, 2);
}

TEST(Allocation, DefaultsAreTheContracts) {
  const auto allocation = read(file(kPool, kLlm));
  ASSERT_TRUE(allocation.ok()) << allocation.status();
  EXPECT_EQ(allocation->scheduler.expand_threshold, 0.75);
  EXPECT_EQ(allocation->scheduler.shrink_threshold, 0.30);
  EXPECT_EQ(allocation->scheduler.cooldown_seconds, 120);
  EXPECT_EQ(allocation->scheduler.window_seconds, 10);
  for (const QueueRules& queue : allocation->queues) {
    EXPECT_EQ(queue.limit, 64);
    EXPECT_EQ(queue.weight, 1);
    EXPECT_EQ(queue.deadline_ms, 0);
  }
  EXPECT_EQ(allocation->admin_port, 0);
}

TEST(Allocation, ReadsEveryFurtherKey) {
  const auto allocation =
      read(file(kPool, kLlm,
                "queues: {video: {limit: 2, weight: 0.5, deadline_ms: 900}}\n"
                "slo: {ttft_ms: 300, tpot_ms: 50}\n"
                "admin: {port: 9000, tokens: {viewer: a, operator: b, approver: c}}\n"
                "scheduler: {window_seconds: 5, forecast_seconds: 30, lending: true, dry_run: true, "
                "approval: true, drain_timeout_seconds: 7, warmup: false}\n"
                "rollout: {canary_share: 0.05, window_seconds: 9, rollback_on: [ttft, errors]}\n"));
  ASSERT_TRUE(allocation.ok()) << allocation.status();
  EXPECT_EQ(allocation->queues[2].limit, 2);
  EXPECT_EQ(allocation->queues[2].weight, 0.5);
  EXPECT_EQ(allocation->queues[2].deadline_ms, 900);
  EXPECT_EQ(allocation->ttft_ms, 300);
  EXPECT_EQ(allocation->tpot_ms, 50);
  EXPECT_EQ(allocation->admin_port, 9000);
  EXPECT_EQ(allocation->admin_tokens.at("approver"), "c");
  EXPECT_TRUE(allocation->scheduler.lending && allocation->scheduler.dry_run && allocation->scheduler.approval);
  EXPECT_FALSE(allocation->scheduler.warmup);
  EXPECT_EQ(allocation->scheduler.drain_timeout_seconds, 7);
  EXPECT_EQ(allocation->rollout.canary_share, 0.05);
  EXPECT_THAT(allocation->rollout.rollback_on, ElementsAre("ttft", "errors"));
}

struct Refusal {
  std::string text;
  std::string begins;  // file, line and key
  std::string says;
};

class Refused : public ::testing::TestWithParam<Refusal> {};

TEST_P(Refused, NamingFileLineAndKey) {
  const std::string message = error(GetParam().text);
  EXPECT_THAT(message, StartsWith(GetParam().begins));
  EXPECT_THAT(message, HasSubstr(GetParam().says));
}

const std::string kTwoPools = "e: {device: gpu-24gb}, p: {device: gpu-40gb}";
INSTANTIATE_TEST_SUITE_P(
    Allocation, Refused,
    ::testing::Values(
        Refusal{file("p: {device: cpu, colour: red}", kLlm), "a.yaml:1: unknown key 'cluster.gpu_pools.p.colour'",
                "device"},
        Refusal{file(kPool, kLlm, "shedule: {}\n"), "a.yaml:4: unknown key 'shedule'", "scheduler"},
        Refusal{file("p: {min_instances: 1}", kLlm), "a.yaml:1: 'cluster.gpu_pools.p.device'", "is missing"},
        Refusal{file("p: {device: cpu, min_instances: 3, max_instances: 2}", kLlm),
                "a.yaml:1: 'cluster.gpu_pools.p.max_instances'", "must not be below min_instances (3)"},
        Refusal{file("p: {device: cpu, max_instances: 0}", kLlm), "a.yaml:1: 'cluster.gpu_pools.p.max_instances'",
                "from 1"},
        Refusal{file("p: {device: cpu, role: chef}", kLlm), "a.yaml:1: 'cluster.gpu_pools.p.role'",
                "must be one of llm, encode, prefill, decode, found 'chef'"},
        Refusal{file(kPool, "llm_backbone: {pool: q}"), "a.yaml:3: 'model.modules.llm_backbone.pool'",
                "no pool of cluster.gpu_pools (p)"},
        Refusal{file(kPool, "vision_encoder: {pool: p}"), "a.yaml:3: 'model.modules.llm_backbone'", "is missing"},
        Refusal{file("", "llm_backbone: []"), "a.yaml:3: 'model.modules.llm_backbone'", "lists no pool"},
        Refusal{file(kPool, "llm_backbone: {pool: p, parallel: tensor}"),
                "a.yaml:3: 'model.modules.llm_backbone.parallel'", "is tensor, which needs tp_size"},
        Refusal{file(kPool, "llm_backbone: {pool: p, parallel: tensor, tp_size: 5}"),
                "a.yaml:3: 'model.modules.llm_backbone.tp_size'",
                "must divide the 12 attention heads of llm_backbone; valid here: 1, 2, 4"},
        Refusal{file(kPool, "llm_backbone: {pool: p, parallel: tensor, tp_size: 3}"),
                "a.yaml:3: 'model.modules.llm_backbone.tp_size'", "valid here: 1, 2, 4"},
        Refusal{file(kPool, "llm_backbone: {pool: p, parallel: pipeline, pp_size: 5}"),
                "a.yaml:3: 'model.modules.llm_backbone.pp_size'", "the 4 layers"},
        Refusal{file(kPool, "llm_backbone: {pool: p, parallel: expert, dp_size: 2, ep_size: 2}"),
                "a.yaml:3: 'model.modules.llm_backbone.ep_size'", "has no experts"},
        Refusal{file(kPool, "llm_backbone: {pool: p, parallel: expert, dp_size: 2, ep_size: 3}"),
                "a.yaml:3: 'model.modules.llm_backbone.ep_size'", "must divide the 2 devices"},
        Refusal{file(kPool, "llm_backbone: {pool: p}, audio_encoder: {pool: p}"),
                "a.yaml:3: 'model.modules.audio_encoder.pool'", "does not have: audio_encoder"},
        Refusal{file(kPool, "llm_backbone: {pool: p, replicas: 2}, vision_encoder: {pool: p, replicas: 2}"),
                "a.yaml:3: 'model.modules.vision_encoder.replicas'", "runs inside each LLM instance"},
        Refusal{file(kPool, "llm_backbone: {pool: p, tp_size: 2}, vision_encoder: {pool: p, dp_size: 4}"),
                "a.yaml:3: 'model.modules.vision_encoder.parallel'", "covers 4 devices, but an instance of p has 2"},
        Refusal{file("p: {device: cpu, max_instances: 2}", "llm_backbone: {pool: p, replicas: 3}"),
                "a.yaml:3: 'model.modules.llm_backbone.replicas'",
                "between the pool's min_instances (1) and max_instances (2)"},
        Refusal{file("p: {device: cpu, max_instances: 4, devices: 7}", "llm_backbone: {pool: p, tp_size: 2}"),
                "a.yaml:1: 'cluster.gpu_pools.p.devices'",
                "must be at least 8: 4 instances (max_instances) of 2 devices"},
        Refusal{file(kTwoPools, kLlm), "a.yaml:1: 'cluster.gpu_pools.e.device'", "no module is placed on the pool e"},
        Refusal{file("e: {device: c1, role: decode}, p: {device: c2}", "vision_encoder: {pool: e}, " + kLlm),
                "a.yaml:1: 'cluster.gpu_pools.e.role'", "llm_backbone is not placed on e; valid here: encode"},
        Refusal{file("p: {device: cpu, role: encode}", kLlm), "a.yaml:1: 'cluster.gpu_pools.p.role'",
                "valid here: llm, prefill, decode"},
        Refusal{file("p: {device: cpu, role: prefill}", kLlm), "a.yaml:1: 'cluster.gpu_pools.p.role'",
                "no pool has the role decode"},
        Refusal{file("p: {device: cpu, role: prefill}, d: {device: cpu, role: decode}",
                     "vision_encoder: {pool: d}, llm_backbone: [{pool: p}, {pool: d}]"),
                "a.yaml:1: 'cluster.gpu_pools.d.role'", "is decode, so d sees no images"},
        Refusal{file(kPool, "llm_backbone: [{pool: p}, {pool: p}]"), "a.yaml:3: 'model.modules.llm_backbone",
                "one entry a pool"},
        Refusal{file(kPool, kLlm, "scheduler: {expand_threshold: 0.3, shrink_threshold: 0.3}\n"),
                "a.yaml:4: 'scheduler.shrink_threshold'", "must be below expand_threshold (0.3)"},
        Refusal{file(kPool, kLlm, "scheduler: {expand_threshold: 1.5}\n"), "a.yaml:4: 'scheduler.expand_threshold'",
                "[0, 1]"},
        Refusal{file(kPool, kLlm, "queues: {image: {limit: -1}}\n"), "a.yaml:4: 'queues.image.limit'", "from 0"},
        Refusal{file(kPool, kLlm, "admin: {tokens: {viewer: ''}}\n"), "a.yaml:4: 'admin.tokens.viewer'", "empty"},
        Refusal{file(kPool, kLlm, "admin: {tokens: {viewer: a, operator: a}}\n"), "a.yaml:4: 'admin.tokens.operator'",
                "viewer"},
        Refusal{file(kPool, kLlm, "admin: {port: 70000}\n"), "a.yaml:4: 'admin.port'", "65535"}));

TEST(Placement, AnEncoderOnTheLlmsPoolIsDataParallelOverItsDevices) {
  const auto out = plan(file(kPool, "llm_backbone: {pool: p, tp_size: 4}, vision_encoder: {pool: p, parallel: data}"));
  ASSERT_TRUE(out.ok()) << out.status();
  const PoolPlan& pool = out->pools[0];
  ASSERT_EQ(pool.modules.size(), 3u);
  EXPECT_EQ(pool.modules[0].module, ModuleName::kVisionEncoder);
  EXPECT_EQ(pool.modules[0].layout.dp, 4);
  EXPECT_EQ(pool.modules[1].layout.dp, 4);
  EXPECT_EQ(pool.modules[2].layout.tp, 4);
  // One that no pool is named for lies there too.
  const auto silent = plan(file(kPool, "llm_backbone: {pool: p, tp_size: 4}"));
  ASSERT_TRUE(silent.ok()) << silent.status();
  EXPECT_EQ(silent->pools[0].modules[0].layout.dp, 4);
  EXPECT_THAT(silent->pools[0].reasons, ::testing::Contains(HasSubstr("vision_encoder: inside each instance")));
}

TEST(Placement, ATextModelHasNoEncoderAnywhere) {
  const auto out = plan(file(kPool, kLlm), text_model());
  ASSERT_TRUE(out.ok()) << out.status();
  EXPECT_EQ(out->pools[0].modules.size(), 1u);
  EXPECT_THAT(error(kExample, text_model()), HasSubstr("does not have: vision_encoder"));
}

TEST(Placement, PrefillEncodesAndDecodeDoesNot) {
  const auto out = plan(file("p: {device: cpu, role: prefill}, d: {device: cpu, role: decode}",
                             "llm_backbone: [{pool: p}, {pool: d, tp_size: 2}]"));
  ASSERT_TRUE(out.ok()) << out.status();
  EXPECT_EQ(out->pools[0].modules.size(), 3u);
  EXPECT_EQ(out->pools[1].modules.size(), 1u);
  EXPECT_EQ(out->pools[1].devices_an_instance, 2);
}

TEST(Placement, WeightsMustFitTheDevicesClass) {
  ModelSpec large = vlm();
  large.backbone.layers = 80;
  large.backbone.hidden = 8192;
  large.backbone.heads = 64;
  large.backbone.kv_heads = 8;
  large.backbone.head_dim = 128;
  large.backbone.intermediate = 29'696;
  large.backbone.vocab = 152'064;
  const auto with_tp = [](int tp) {
    return file("p: {device: gpu-80gb}", "llm_backbone: {pool: p, tp_size: " + std::to_string(tp) + "}");
  };
  EXPECT_THAT(error(with_tp(2), large), StartsWith("a.yaml:1: 'cluster.gpu_pools.p.device': a device of an instance"));
  EXPECT_THAT(error(with_tp(2), large), HasSubstr("gpu-80gb has 80 GB"));
  const auto fits = plan(with_tp(8), large);
  ASSERT_TRUE(fits.ok()) << fits.status();
  const auto whole = plan(file("p: {device: what}", "llm_backbone: {pool: p}"), large);
  ASSERT_TRUE(whole.ok()) << "a class without a known memory is not checked: " << whole.status();
  EXPECT_NEAR(static_cast<double>(whole->pools[0].weight_bytes) / 8, static_cast<double>(fits->pools[0].weight_bytes),
              1e-3 * static_cast<double>(whole->pools[0].weight_bytes));
  // What the file says of a class goes over its name.
  const std::string classes =
      "cluster: {device_classes: {gpu-80gb: {memory_gb: 300, kind: odd}}, gpu_pools: {p: {device: "
      "gpu-80gb}}}\nmodel: {modules: {llm_backbone: {pool: p, tp_size: 2}}}\n";
  EXPECT_TRUE(plan(classes, large).ok()) << error(classes, large);
}

TEST(Placement, DeviceMapNamesClassesOfTheFile) {
  const auto allocation = read(kExample);
  ASSERT_TRUE(allocation.ok());
  const auto map = parse_device_map("gpu-24gb=cpu,gpu-40gb=cuda", *allocation);
  ASSERT_TRUE(map.ok()) << map.status();
  EXPECT_EQ(map->at("gpu-24gb"), "cpu");
  EXPECT_EQ(map->at("gpu-40gb"), "cuda");
  for (const char* wrong : {"gpu-25gb=cpu", "gpu-24gb=tpu", "gpu-24gb", "gpu-24gb=cpu,gpu-24gb=cpu", ","}) {
    EXPECT_THAT(std::string(parse_device_map(wrong, *allocation).status().message()), StartsWith("--device-map"))
        << wrong;
  }
}

TEST(Placement, ShowsEveryDefaultAndNoSecret) {
  const auto allocation = read(kExample + "admin: {tokens: {viewer: open-sesame}}\n");
  ASSERT_TRUE(allocation.ok()) << allocation.status();
  const auto plan = place(*allocation, vlm(), DType::kFloat32);
  ASSERT_TRUE(plan.ok());
  const Json json = placement_json(*allocation, *plan, {{"gpu-24gb", "cpu"}});
  EXPECT_EQ(json["pools"]["encoder-pool"]["computes_on"], "cpu");
  EXPECT_EQ(json["pools"]["llm-pool"]["computes_on"], "cuda");
  EXPECT_EQ(json["pools"]["llm-pool"]["modules"]["llm_backbone"]["tp_size"], 2);
  EXPECT_EQ(json["queues"]["mixed"]["limit"], 64);
  EXPECT_EQ(json["admin"]["tokens_for"], Json({"viewer"}));
  EXPECT_THAT(json.dump(), ::testing::Not(HasSubstr("open-sesame")));
}

}  // namespace
}  // namespace parvl
