#include "parvl/base/gpu_driver.h"

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <dlfcn.h>

#include "parvl/base/env.h"

namespace parvl {

absl::StatusOr<void*> load_gpu_driver() {
  if (void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL); driver != nullptr) return driver;
  return absl::FailedPreconditionError(
      absl::StrCat("no GPU: the NVIDIA driver's libcuda.so.1 is not on this machine; ", kUseCpu));
}

absl::StatusOr<int64_t> count_gpus() {
  PARVL_ASSIGN_OR_RETURN(void* const driver, load_gpu_driver());
  const auto init = reinterpret_cast<int (*)(unsigned)>(dlsym(driver, "cuInit"));
  const auto count = reinterpret_cast<int (*)(int*)>(dlsym(driver, "cuDeviceGetCount"));
  int out = 0;
  if (init == nullptr || count == nullptr || init(0) != 0 || count(&out) != 0 || out == 0) return no_gpu_shown();
  return out;
}

std::vector<std::string> gpu_names(int64_t count) {
  std::vector<std::string> out;
  if (const std::string visible = get_env("CUDA_VISIBLE_DEVICES"); !visible.empty()) {
    out = absl::StrSplit(visible, ',');
    if (static_cast<int64_t>(out.size()) > count) out.resize(static_cast<size_t>(count));  // CUDA stops at a wrong name
    return out;
  }
  for (int64_t i = 0; i < count; ++i) out.push_back(absl::StrCat(i));
  return out;
}

int64_t gpu_number(int64_t index) {
  const std::vector<std::string> names = gpu_names(index + 1);
  int64_t number = 0;
  if (index < 0 || index >= static_cast<int64_t>(names.size())) return index;
  return absl::SimpleAtoi(names.back(), &number) && number >= 0 ? number : index;
}

absl::Status no_gpu_shown() {
  return absl::FailedPreconditionError(absl::StrCat("the NVIDIA driver reports no GPU; ", kUseCpu));
}

}  // namespace parvl
