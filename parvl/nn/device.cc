#include "parvl/nn/device.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <absl/strings/str_cat.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include "parvl/base/gpu_driver.h"
#include "parvl/base/log.h"
#include "parvl/base/memory.h"
#include "parvl/nn/cuda_ops.h"

namespace parvl {
namespace {

// Loads what PyTorch registers CUDA with. The library is found beside libtorch_cpu (this program's run path) or through
// the loader's usual places.
absl::Status load_cuda() {
  // PyTorch looks for CUDA once, at the first question, so nothing may ask before the library is there.
  PARVL_RETURN_IF_ERROR(load_gpu_driver().status());
  // Lazy: of the libraries it links, only those that are called need to be complete.
  if (dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_GLOBAL) == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat("libtorch_cuda.so does not load (", dlerror(),
                                                      "); install PyTorch's CUDA libraries or ", kUseCpu));
  }
  if (!at::hasCUDA() || at::detail::getCUDAHooks().deviceCount() == 0) return no_gpu_shown();
  return absl::OkStatus();
}

absl::StatusOr<at::Device> take_gpu(int64_t local_rank) {
  const int64_t count = at::detail::getCUDAHooks().deviceCount();
  if (local_rank >= count) {
    return invalid("this machine has ", count, count == 1 ? " GPU" : " GPUs", " for rank ", local_rank,
                   " of its processes (LOCAL_RANK), counted from 0; start ", count,
                   count == 1 ? " process" : " processes", " here, one a GPU, or set train.device to cpu");
  }
  const at::Device device(at::kCUDA, static_cast<at::DeviceIndex>(local_rank));
  at::globalContext().lazyInitDevice(at::kCUDA);
  c10::impl::VirtualGuardImpl(at::kCUDA).setDevice(device);
  const absl::Status kernels = cuda::load_kernels();
  if (!kernels.ok()) log_warning(kernels.message(), "; GPU operations run unfused");
  return device;
}

}  // namespace

absl::StatusOr<at::Device> select_device(const std::string& name, int64_t local_rank) {
  if (name == "cpu") return at::Device(at::kCPU);
  if (name != "auto" && name != "cuda") return invalid("device '", name, "' is not one of auto, cpu, cuda");
  const absl::Status cuda = load_cuda();
  if (cuda.ok()) return take_gpu(local_rank);
  if (name == "cuda") return cuda;
  return at::Device(at::kCPU);
}

void use_deterministic_kernels(at::Device device) {
  if (!device.is_cuda()) return;
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  at::globalContext().setDeterministicFillUninitializedMemory(false);  // a debugging aid that fills every new tensor
}

std::string device_text(at::Device device) {
  return device.is_cuda() ? absl::StrCat("cuda:", gpu_number(device.index())) : device.str();
}

void use_own_stream(at::Device device) {
  if (!device.is_cuda()) return;
  const c10::impl::VirtualGuardImpl impl(at::kCUDA);
  impl.setDevice(device);
  impl.exchangeStream(impl.getStreamFromGlobalPool(device, /*isHighPriority=*/false));
}

at::Tensor upload(const at::Tensor& host, at::Device device) {
  return device.is_cuda() ? host.pin_memory().to(device, /*non_blocking=*/true) : host;
}

void synchronize(at::Device device) {
  if (!device.is_cuda()) return;
  const c10::impl::VirtualGuardImpl impl(at::kCUDA);
  impl.synchronizeStream(impl.getStream(device));
}

DeviceMemory device_memory(at::Device device) {
  if (!device.is_cuda()) {
    const int64_t free = available_bytes();
    return {free, free};
  }
  const auto [free, total] = at::getDeviceAllocator(at::kCUDA)->getMemoryInfo(device.index());
  return {static_cast<int64_t>(free), static_cast<int64_t>(total)};
}

int64_t memory_in_use(at::Device device) {
  if (!device.is_cuda()) return resident_bytes();
  const auto stats = at::getDeviceAllocator(at::kCUDA)->getDeviceStats(device.index());
  return stats.allocated_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)].peak;
}

double peak_flops(at::Device device, at::ScalarType type) {
  if (!device.is_cuda()) return 0;
  using GetName = int (*)(char*, int, int);
  auto* get_name = reinterpret_cast<GetName>(dlsym(RTLD_DEFAULT, "cuDeviceGetName"));
  char name[128] = {};
  if (get_name == nullptr || get_name(name, sizeof name - 1, device.index()) != 0) return 0;
  struct Rates {
    const char* part;
    double half, single;
  };
  // Data sheets of the SXM or, where named so, PCIe parts.
  static const Rates kRates[] = {{"H200", 989e12, 67e12},   {"H100 PCIe", 756e12, 51e12}, {"H100", 989e12, 67e12},
                                 {"A100", 312e12, 19.5e12}, {"L40S", 362e12, 91.6e12},    {"L4", 121e12, 30.3e12}};
  for (const Rates& rates : kRates) {
    if (std::string(name).find(rates.part) == std::string::npos) continue;
    if (type == at::kDouble) return 0;
    return type == at::kFloat ? rates.single : rates.half;
  }
  return 0;
}

}  // namespace parvl
