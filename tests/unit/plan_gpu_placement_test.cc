#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "parvl/plan/gpu_placement.h"

namespace parvl {
namespace {

PoolPlan pool(const std::string& name, int64_t instances, int64_t devices) {
  PoolPlan out;
  out.name = name;
  out.instances = instances;
  out.devices_an_instance = devices;
  return out;
}

TEST(GpuPlacement, EachInstanceHasItsOwnGpus) {
  const PoolPlan encoders = pool("encoder-pool", 2, 1), llm = pool("llm-pool", 2, 2);
  const auto placed = place_on_gpus({&encoders, &llm}, {"0", "1", "2", "3", "4", "5", "6"});
  ASSERT_TRUE(placed.ok()) << placed.status();
  using Names = std::vector<std::vector<std::string>>;
  EXPECT_EQ(placed->at("encoder-pool"), (Names{{"0"}, {"1"}}));
  EXPECT_EQ(placed->at("llm-pool"), (Names{{"2", "3"}, {"4", "5"}}));
  EXPECT_EQ(placed->size(), 2u);
}

TEST(GpuPlacement, TooFewAreRefused) {
  const PoolPlan encoders = pool("encoder-pool", 2, 1), llm = pool("llm-pool", 2, 2);
  EXPECT_EQ(place_on_gpus({&encoders, &llm}, {"0", "1", "2", "3", "4"}).status().message(),
            "the pools need 6 GPUs (encoder-pool 2 × 1, llm-pool 2 × 2), and this machine has 5; give them fewer "
            "replicas or devices, or compute a class on the CPU: --device-map CLASS=cpu");
  EXPECT_TRUE(place_on_gpus({}, {}).ok());
}

}  // namespace
}  // namespace parvl
