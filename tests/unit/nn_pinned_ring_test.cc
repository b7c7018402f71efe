// Copies through the ring against Tensor::copy_, to the bit: on the CPU with buffers of a few elements, so that each is
// used again and again, and on a GPU, where there is one, with copies that overlap.
#include <gmock/gmock.h>

#include <cstring>

#include "parvl/nn/device.h"
#include "parvl/nn/pinned_ring.h"

namespace parvl {
namespace {

constexpr at::ScalarType kTypes[] = {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble};

// Values of many sizes, ties of rounding, subnormal ones and those that a narrower type has no number for.
at::Tensor make_values(int64_t count, at::ScalarType type) {
  const at::Tensor i = at::arange(count, at::kDouble);
  return ((i * 0.37).sin() * (i.remainder(97) - 60).mul(0.7).exp2() * (1 + i.remainder(5) / 256)).to(type);
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.cpu().contiguous(), y = b.cpu().contiguous();
  return x.nbytes() == y.nbytes() && (x.nbytes() == 0 || std::memcmp(x.data_ptr(), y.data_ptr(), x.nbytes()) == 0);
}

// Into the middle of a larger tensor, whose ends must stay as they are.
void check_copy(PinnedRing& ring, const at::Tensor& from, at::ScalarType type, at::Device device) {
  SCOPED_TRACE(testing::Message() << from.numel() << " of " << from.scalar_type() << " to " << type);
  constexpr int64_t kBorder = 3;
  const at::Tensor want = at::full({from.numel() + 2 * kBorder}, 7, type), got = want.to(device, type, false, true);
  want.narrow(0, kBorder, from.numel()).copy_(from.flatten());
  ring.copy(from, got.narrow(0, kBorder, from.numel()).view(from.sizes()));
  EXPECT_TRUE(same_bits(got, want));
}

TEST(PinnedRing, CopiesAsCopyDoesOntoTheCpu) {
  for (const int64_t buffers : {1, 2, 3}) {
    PinnedRing ring(at::kCPU, {buffers, 64});
    for (const at::ScalarType from : kTypes) {
      for (const at::ScalarType to : kTypes) {
        const int64_t room = 64 / static_cast<int64_t>(at::elementSize(to));
        for (const int64_t count : {int64_t{0}, int64_t{1}, room - 1, room, room + 1, 3 * room, 7 * room + 5}) {
          check_copy(ring, make_values(count, from), to, at::kCPU);
        }
      }
    }
    check_copy(ring, make_values(9 * 35, at::kBFloat16).view({9, 5, 7}), at::kFloat, at::kCPU);
    check_copy(ring, make_values(1, at::kFloat).view({}), at::kFloat, at::kCPU);
  }
}

TEST(PinnedRing, CopiesAsCopyDoesOntoAGpu) {
  const auto device = select_device("cuda");
  if (!device.ok()) GTEST_SKIP() << device.status().message();
  use_own_stream(*device);
  for (const int64_t bytes : {int64_t{64}, int64_t{1} << 20}) {
    PinnedRing ring(*device, {3, bytes});
    for (const at::ScalarType from : kTypes) {
      for (const at::ScalarType to : kTypes) {
        const int64_t room = bytes / static_cast<int64_t>(at::elementSize(to));
        for (const int64_t count : {int64_t{0}, int64_t{1}, room, room + 1, 40 * room + 5}) {
          check_copy(ring, make_values(count, from), to, *device);
        }
      }
    }
  }
}

// The device is busy while the ring goes around: a buffer that were filled before it is taken would show.
TEST(PinnedRing, WaitsForABusyGpu) {
  const auto device = select_device("cuda");
  if (!device.ok()) GTEST_SKIP() << device.status().message();
  use_own_stream(*device);
  constexpr int64_t kCount = 1 << 20;
  const at::Tensor work = at::ones({4096, 4096}, at::TensorOptions().device(*device));
  const at::Tensor values = make_values(kCount, at::kFloat);
  PinnedRing ring(*device, {2, 1 << 16});
  const at::Tensor got = at::empty({kCount}, work.options());
  for (int i = 0; i < 50; ++i) at::mm(work, work);
  ring.copy(values, got);
  EXPECT_TRUE(same_bits(got, values));
}

}  // namespace
}  // namespace parvl
