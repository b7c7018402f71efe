// Copies from ordinary memory, a mapped file say, to a GPU at the speed of its link: through a few pinned buffers.
// While the GPU takes what is in some, the CPU's threads read and convert into the next.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>

#include <vector>

namespace parvl {

struct PinnedRingOptions {
  int64_t buffers = 4;
  int64_t buffer_bytes = int64_t{16} << 20;  // a multiple of 8
};

// One thread's. Throws libtorch's exceptions.
class PinnedRing {
 public:
  // Onto a CPU the same way is taken through buffers that are not pinned.
  explicit PinnedRing(at::Device to, const PinnedRingOptions& options = {});

  // Gives `to` the bits of to.copy_(from). Both contiguous and of as many elements, `from` on the CPU. On return `from`
  // has been read; `to` is written in the order of this thread's stream.
  void copy(const at::Tensor& from, const at::Tensor& to);

 private:
  struct Buffer {
    at::Tensor bytes;
    c10::Event taken;  // when the device has what was last in it
  };
  std::vector<Buffer> buffers_;
  size_t next_ = 0;
};

}  // namespace parvl
