// Launching a kernel that may begin before the one in front of it on the stream has ended (programmatic dependent
// launch, Hopper): what does not depend on that one is fetched while it drains.
#pragma once

#include <cuda_runtime.h>

namespace parvl::kernels {

struct LaunchShape {
  dim3 grid;
  unsigned threads = 0;
  cudaStream_t stream = nullptr;
};

// Before the first read of what earlier kernels wrote, and before the first write of what they may still read.
__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel's blocks start when every block has come here. It still waits for all our writes.
__device__ inline void start_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

inline bool has_dependent_launch() {
  static const bool has = [] {
    int device = 0, major = 0;
    return cudaGetDevice(&device) == cudaSuccess &&
           cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= 9;
  }();
  return has;
}

// Returns cudaGetLastError(). Every kernel launched so must call wait_for_previous_kernel.
template <typename... Params, typename... Args>
int launch_dependent(void (*kernel)(Params...), const LaunchShape& shape, Args... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = dim3(shape.threads);
  config.stream = shape.stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = has_dependent_launch() ? 1 : 0;
  return static_cast<int>(cudaLaunchKernelEx(&config, kernel, Params(args)...));
}

}  // namespace parvl::kernels
