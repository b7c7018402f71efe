#include "parvl/nn/pinned_ring.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "parvl/base/check.h"

namespace parvl {

PinnedRing::PinnedRing(at::Device to, const PinnedRingOptions& options) {
  PARVL_CHECK(options.buffers > 0 && options.buffer_bytes > 0 && options.buffer_bytes % 8 == 0,
              "a ring of no elements");
  const auto bytes = at::TensorOptions().dtype(at::kByte).pinned_memory(to.is_cuda());
  for (int64_t i = 0; i < options.buffers; ++i) {
    buffers_.push_back({at::empty({options.buffer_bytes}, bytes), c10::Event(to.type())});
  }
}

void PinnedRing::copy(const at::Tensor& from, const at::Tensor& to) {
  PARVL_CHECK(from.is_contiguous() && to.is_contiguous() && from.numel() == to.numel(), "a copy that is no flat one");
  const at::Tensor source = from.view({from.numel()}), target = to.view({to.numel()});
  for (int64_t begin = 0; begin < target.numel();) {
    Buffer& buffer = buffers_[next_++ % buffers_.size()];
    buffer.taken.synchronize();
    const at::Tensor room = buffer.bytes.view(to.scalar_type());
    const int64_t count = std::min(room.numel(), target.numel() - begin);
    const at::Tensor part = room.narrow(0, 0, count);
    part.copy_(source.narrow(0, begin, count));  // on all threads; a dtype is converted here, as copy_ itself would
    target.narrow(0, begin, count).copy_(part, /*non_blocking=*/true);
    if (to.is_cuda()) buffer.taken.record(c10::impl::VirtualGuardImpl(at::kCUDA).getStream(to.device()));
    begin += count;
  }
}

}  // namespace parvl
