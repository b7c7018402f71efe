// Holds nccl_api.h against NCCL's own header; built where that is found.
#include <nccl.h>

#include <type_traits>

#include "parvl/comm/nccl/nccl_api.h"

namespace parvl::nccl {
namespace {

static_assert(sizeof(UniqueId) == sizeof(ncclUniqueId) && alignof(UniqueId) == alignof(ncclUniqueId));
static_assert(kSuccess == ncclSuccess && kInProgress == ncclInProgress);
static_assert(kFloat16 == ncclFloat16 && kFloat32 == ncclFloat32 && kFloat64 == ncclFloat64);
static_assert(kBFloat16 == ncclBfloat16 && kSum == ncclSum && kMax == ncclMax);

// An argument as the calling convention passes it.
template <typename T>
struct Passed {
  using type = T;
};
template <typename T>
requires std::is_enum_v<T>
struct Passed<T> {
  using type = int;
};
template <>
struct Passed<ncclUniqueId> {
  using type = UniqueId;
};
template <>
struct Passed<ncclUniqueId*> {
  using type = UniqueId*;
};
template <>
struct Passed<ncclComm_t> {
  using type = Comm;
};
template <>
struct Passed<ncclComm_t*> {
  using type = Comm*;
};
template <>
struct Passed<ncclResult_t*> {
  using type = int*;
};
template <>
struct Passed<cudaStream_t> {
  using type = void*;
};
template <typename R, typename... A>
auto passed(R (*)(A...)) -> typename Passed<R>::type (*)(typename Passed<A>::type...);

template <auto kFunction, typename Ours>
constexpr bool kSame = std::is_same_v<decltype(passed(kFunction)), Ours>;

static_assert(kSame<ncclGetUniqueId, decltype(Api::get_unique_id)>);
static_assert(kSame<ncclCommInitRank, decltype(Api::comm_init_rank)>);
static_assert(kSame<ncclCommDestroy, decltype(Api::comm_destroy)>);
static_assert(kSame<ncclCommAbort, decltype(Api::comm_abort)>);
static_assert(kSame<ncclCommGetAsyncError, decltype(Api::comm_async_error)>);
static_assert(kSame<ncclGetErrorString, decltype(Api::error_text)>);
static_assert(kSame<ncclGetLastError, decltype(Api::last_error)>);
static_assert(kSame<ncclGroupStart, decltype(Api::group_start)>);
static_assert(kSame<ncclGroupEnd, decltype(Api::group_end)>);
static_assert(kSame<ncclAllReduce, decltype(Api::all_reduce)>);
static_assert(kSame<ncclAllGather, decltype(Api::all_gather)>);
static_assert(kSame<ncclReduceScatter, decltype(Api::reduce_scatter)>);
static_assert(kSame<ncclBroadcast, decltype(Api::broadcast)>);
static_assert(kSame<ncclSend, decltype(Api::send)>);
static_assert(kSame<ncclRecv, decltype(Api::receive)>);

}  // namespace
}  // namespace parvl::nccl
