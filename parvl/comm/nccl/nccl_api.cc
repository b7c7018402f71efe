#include "parvl/comm/nccl/nccl_api.h"

#include <dlfcn.h>

namespace parvl::nccl {
namespace {

constexpr char kLibrary[] = "libnccl.so.2";

absl::StatusOr<Api> find_all() {
  void* library = dlopen(kLibrary, RTLD_LAZY | RTLD_LOCAL);
  if (library == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat("training on several GPUs needs NCCL, but ", kLibrary,
                                                      " does not load (", dlerror(),
                                                      "); install it, or set train.device to cpu"));
  }
  Api out{};
  std::string missing;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr) missing = name;
  };
  find(out.get_unique_id, "ncclGetUniqueId");
  find(out.comm_init_rank, "ncclCommInitRank");
  find(out.comm_destroy, "ncclCommDestroy");
  find(out.comm_abort, "ncclCommAbort");
  find(out.comm_async_error, "ncclCommGetAsyncError");
  find(out.error_text, "ncclGetErrorString");
  find(out.last_error, "ncclGetLastError");
  find(out.group_start, "ncclGroupStart");
  find(out.group_end, "ncclGroupEnd");
  find(out.all_reduce, "ncclAllReduce");
  find(out.all_gather, "ncclAllGather");
  find(out.reduce_scatter, "ncclReduceScatter");
  find(out.broadcast, "ncclBroadcast");
  find(out.send, "ncclSend");
  find(out.receive, "ncclRecv");
  if (missing.empty()) return out;
  return absl::FailedPreconditionError(
      absl::StrCat(kLibrary, " has no ", missing, "; it is older than 2.13: install a newer one"));
}

}  // namespace

absl::StatusOr<const Api*> load_api() {
  static const absl::StatusOr<Api> kApi = find_all();
  if (!kApi.ok()) return kApi.status();
  return &*kApi;
}

}  // namespace parvl::nccl
