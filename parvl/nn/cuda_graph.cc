// Part of libparvl_cuda.so.
#include "parvl/nn/cuda_graph.h"

#include <ATen/cuda/CUDAGraph.h>

namespace parvl {
namespace {

class Graph : public CudaGraph {
 public:
  at::cuda::CUDAGraph graph;
  void replay() override { graph.replay(); }
};

class Pool : public CudaGraphPool {
 public:
  std::unique_ptr<CudaGraph> capture(const std::function<void()>& work) override {
    auto out = std::make_unique<Graph>();
    // Thread-local: allocations of other threads do not disturb it.
    out->graph.capture_begin(pool_, cudaStreamCaptureModeThreadLocal);
    try {
      work();
    } catch (...) {
      try {
        out->graph.capture_end();  // or the stream stays in capture
      } catch (const c10::Error&) {
      }
      throw;
    }
    out->graph.capture_end();
    return out;
  }

 private:
  at::MempoolId_t pool_ = at::cuda::graph_pool_handle();
};

}  // namespace
}  // namespace parvl

extern "C" __attribute__((visibility("default"))) parvl::CudaGraphPool* parvl_new_cuda_graph_pool() {
  return new parvl::Pool();
}
