// The part of NCCL's C interface that groups use, found at run time in the library that libtorch_cuda brings: the
// program is built and starts without it. The types are those of nccl.h since 2.10; nccl_api_check.cc holds them
// against that header where a build finds it.
#pragma once

#include <cstddef>

#include "parvl/base/status.h"

namespace parvl::nccl {

struct UniqueId {
  char bytes[128] = {};
};
using Comm = struct CommOpaque*;

inline constexpr int kSuccess = 0, kInProgress = 7;                            // ncclResult_t
inline constexpr int kFloat16 = 6, kFloat32 = 7, kFloat64 = 8, kBFloat16 = 9;  // ncclDataType_t
inline constexpr int kSum = 0, kMax = 2;                                       // ncclRedOp_t

// Each gives an ncclResult_t unless it gives text; `stream` is a cudaStream_t.
struct Api {
  int (*get_unique_id)(UniqueId* id);
  int (*comm_init_rank)(Comm* comm, int ranks, UniqueId id, int rank);
  int (*comm_destroy)(Comm comm);
  int (*comm_abort)(Comm comm);
  int (*comm_async_error)(Comm comm, int* error);
  const char* (*error_text)(int result);
  const char* (*last_error)(Comm comm);  // of any communicator; may be null or empty
  int (*group_start)();
  int (*group_end)();
  int (*all_reduce)(const void* in, void* out, size_t count, int type, int op, Comm comm, void* stream);
  int (*all_gather)(const void* in, void* out, size_t in_count, int type, Comm comm, void* stream);
  int (*reduce_scatter)(const void* in, void* out, size_t out_count, int type, int op, Comm comm, void* stream);
  int (*broadcast)(const void* in, void* out, size_t count, int type, int root, Comm comm, void* stream);
  int (*send)(const void* in, size_t count, int type, int to, Comm comm, void* stream);
  int (*receive)(void* out, size_t count, int type, int from, Comm comm, void* stream);
};

// Lives as long as the process. FailedPrecondition naming what is missing. libtorch_cuda must have been loaded. Any
// thread.
absl::StatusOr<const Api*> load_api();

}  // namespace parvl::nccl
