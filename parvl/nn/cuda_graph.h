// A piece of GPU work recorded once and replayed by one launch. Comes from libparvl_cuda.so, since it needs
// libtorch_cuda.
#pragma once

#include <functional>
#include <memory>

namespace parvl {

class CudaGraph {
 public:
  virtual ~CudaGraph() = default;
  // Queues the recorded work on the current stream. The tensors it reads and writes are those of the recording.
  virtual void replay() = 0;
};

// Graphs that never run at the same time share one pool of memory for what they compute in between.
class CudaGraphPool {
 public:
  virtual ~CudaGraphPool() = default;
  // Runs `work` on the current stream, which must not be the default one, without executing it. Memory that it
  // allocates stays set aside for the graph's life. Other threads may use the device meanwhile. Throws libtorch's
  // exceptions, also for work that cannot be recorded.
  virtual std::unique_ptr<CudaGraph> capture(const std::function<void()>& work) = 0;
};

// nullptr without libparvl_cuda.so. Call after cuda::load_kernels.
std::unique_ptr<CudaGraphPool> make_cuda_graph_pool();

inline constexpr char kCudaGraphPoolSymbol[] = "parvl_new_cuda_graph_pool";  // () → CudaGraphPool*, the caller's

}  // namespace parvl
