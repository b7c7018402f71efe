// Which device computes. CUDA's half of libtorch is loaded only when a GPU is used.
#pragma once

#include <ATen/ATen.h>

#include <string>

#include "parvl/base/status.h"

namespace parvl {

// auto: a GPU when there is one and libtorch_cuda loads, else the CPU. cuda: that, or an error that says what is
// missing. cpu. `local_rank`: this process among those of its machine that take a GPU each, which becomes the thread's
// current one; InvalidArgument where the machine has fewer. Call from one thread, before other work on a GPU.
absl::StatusOr<at::Device> select_device(const std::string& name, int64_t local_rank = 0);

// From here on sums on a GPU are made in a fixed order, so that a run repeats to the bit; an operation that has no such
// kernel throws. cuBLAS must have been told by CUBLAS_WORKSPACE_CONFIG=:4096:8 before the GPU is first used. No effect
// on the CPU, whose kernels here always repeat.
void use_deterministic_kernels(at::Device device);

// "cpu", or "cuda:2" with the GPU's number on the machine, also where CUDA_VISIBLE_DEVICES shows this process others.
std::string device_text(at::Device device);

// From here on this thread queues on a stream of its own, so that its work overlaps other threads'. No effect on the
// CPU.
void use_own_stream(at::Device device);

// The same values on the device: on the way to a GPU through pinned memory, so that the call waits neither for the copy
// nor for what is queued before it. `host`: in the CPU's memory; free to go at once.
at::Tensor upload(const at::Tensor& host, at::Device device);

// Waits until the device has finished what this thread queued on its stream.
void synchronize(at::Device device);

struct DeviceMemory {
  int64_t free = 0;   // what this process could still get
  int64_t total = 0;  // of the device; of the CPU the same as `free`
};
DeviceMemory device_memory(at::Device device);

// Most bytes that tensors held at once on a GPU; the process's resident bytes on the CPU.
int64_t memory_in_use(at::Device device);

// The vendor's dense matrix rate of a GPU in FLOP/s for a compute dtype (without sparsity; float32 without tf32); 0
// when the device is not in the table (the CPU is not).
double peak_flops(at::Device device, at::ScalarType type);

}  // namespace parvl
