#include "parvl/comm/nccl/nccl_communicator.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "parvl/base/check.h"
#include "parvl/comm/nccl/nccl_api.h"

namespace parvl {
namespace {

constexpr std::chrono::microseconds kSlice(50);  // between two looks whether the GPU has come so far
constexpr std::chrono::seconds kLongestCall(1);  // that queueing a call takes, unless it hangs

c10::impl::VirtualGuardImpl gpu() { return c10::impl::VirtualGuardImpl(at::kCUDA); }

int type_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return nccl::kFloat32;
    case DType::kFloat64:
      return nccl::kFloat64;
    case DType::kBFloat16:
      return nccl::kBFloat16;
    case DType::kFloat16:
      return nccl::kFloat16;
  }
  PARVL_CHECK(false, "no such dtype");
  return nccl::kFloat32;
}

// Memory itself says whose it is. No memory at all, which goes with no values, fits either.
bool on_gpu(const void* data) {
  using Get = int (*)(void*, int, unsigned long long);
  static const auto kGet = reinterpret_cast<Get>(dlsym(RTLD_DEFAULT, "cuPointerGetAttribute"));
  constexpr int kMemoryType = 2;         // CU_POINTER_ATTRIBUTE_MEMORY_TYPE
  constexpr unsigned kDeviceMemory = 2;  // CU_MEMORYTYPE_DEVICE
  unsigned type = 0;
  if (data == nullptr) return true;
  return kGet != nullptr && kGet(&type, kMemoryType, reinterpret_cast<unsigned long long>(data)) == 0 &&
         type == kDeviceMemory;
}

// What a rank's groups share: the library, the GPU, and their common end.
class NcclRank {
 public:
  NcclRank(const nccl::Api& api, at::Device device) : api_(api), device_(device) {}
  ~NcclRank() {
    if (ending_.joinable()) ending_.join();
  }

  const nccl::Api& api() const { return api_; }
  at::Device device() const { return device_; }
  at::Stream stream() const { return gpu().getStream(device_); }

  void add(nccl::Comm comm) {
    std::lock_guard lock(mutex_);
    comms_.push_back(comm);
  }
  void remove(nccl::Comm comm) {
    {
      std::lock_guard lock(mutex_);
      const auto found = std::find(comms_.begin(), comms_.end(), comm);
      if (found == comms_.end()) return;  // ended
      comms_.erase(found);
    }
    api_.comm_destroy(comm);
  }

  absl::Status ended() const {
    std::lock_guard lock(mutex_);
    return ended_.empty() ? absl::OkStatus() : absl::AbortedError(ended_);
  }
  // On a thread of its own: NCCL may wait there for what the GPU does.
  void abort(const std::string& reason) {
    std::lock_guard lock(mutex_);
    if (!ended_.empty()) return;
    ended_ = reason;
    changed_.notify_all();
    ending_ = std::thread([this, comms = std::exchange(comms_, {})] {
      std::unique_lock calls(calls_, kLongestCall);  // not taken by then: the call hangs, and ends by this
      api_.group_start();                            // together, since one that is left could hold up the others
      for (const nccl::Comm comm : comms) api_.comm_abort(comm);
      api_.group_end();
    });
  }

  // Held while a call is queued.
  std::timed_mutex& calls() { return calls_; }
  absl::Status error(const std::string& what, int result, nccl::Comm comm) const {
    const char* more = api_.last_error(comm);
    return failed(what, " failed: ", api_.error_text(result), more == nullptr || *more == '\0' ? "" : ": ",
                  more == nullptr ? "" : more);
  }

  // Until the GPU has done what the current stream holds.
  absl::Status finish(const std::string& what, nccl::Comm comm) {
    c10::Event event(at::kCUDA);
    event.record(stream());
    std::unique_lock lock(mutex_);
    while (!event.query()) {
      if (!ended_.empty()) return absl::AbortedError(ended_);
      int result = nccl::kSuccess;
      const int asked = api_.comm_async_error(comm, &result);
      if (asked == nccl::kSuccess && result != nccl::kSuccess && result != nccl::kInProgress) {
        return error(what, result, comm);
      }
      changed_.wait_for(lock, kSlice, [this] { return !ended_.empty(); });
    }
    return ended_.empty() ? absl::OkStatus() : absl::AbortedError(ended_);
  }

 private:
  const nccl::Api& api_;
  const at::Device device_;
  std::timed_mutex calls_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<nccl::Comm> comms_;
  std::string ended_;
  std::thread ending_;
};

// Work that is queued already. `done`: where it is not in the current stream's own order.
class QueuedWork : public Work {
 public:
  QueuedWork(NcclRank& rank, absl::Status status, std::optional<c10::Event> done = std::nullopt)
      : rank_(rank), status_(std::move(status)), done_(std::move(done)) {}

  absl::Status wait() override {
    if (!status_.ok()) return status_;
    if (done_.has_value()) done_->block(rank_.stream());
    return rank_.ended();
  }

 private:
  NcclRank& rank_;
  absl::Status status_;
  std::optional<c10::Event> done_;
};

class Barrier : public Work {
 public:
  Barrier(NcclRank& rank, std::string what, nccl::Comm comm, ProcessGroup& host)
      : rank_(rank), what_(std::move(what)), comm_(comm), host_(host) {}
  absl::Status wait() override {
    PARVL_RETURN_IF_ERROR(catch_exceptions(what_, [&] { return rank_.finish(what_, comm_); }));
    return host_.barrier()->wait();
  }

 private:
  NcclRank& rank_;
  const std::string what_;
  const nccl::Comm comm_;
  ProcessGroup& host_;
};

class NcclGroup : public ProcessGroup {
 public:
  NcclGroup(NcclRank& rank, nccl::Comm comm, std::unique_ptr<ProcessGroup> host)
      : rank_(rank), comm_(comm), host_(std::move(host)) {
    rank_.add(comm_);
  }
  ~NcclGroup() override { rank_.remove(comm_); }

  int64_t rank() const override { return host_->rank(); }
  int64_t size() const override { return host_->size(); }
  const std::string& name() const override { return host_->name(); }

  std::unique_ptr<Work> all_reduce(Buffer values, ReduceOp op) override {
    if (!on_gpu(values.data)) return host_->all_reduce(values, op);
    return queue("all_reduce", values, [&](void* stream) {
      return api().all_reduce(values.data, values.data, count(values), type_of(values.dtype),
                              op == ReduceOp::kSum ? nccl::kSum : nccl::kMax, comm_, stream);
    });
  }
  std::unique_ptr<Work> all_gather(ConstBuffer in, Buffer out) override {
    if (!on_gpu(in.data)) return host_->all_gather(in, out);
    PARVL_CHECK(out.count == in.count * size() && in.dtype == out.dtype, "all_gather: out does not fit in");
    return queue("all_gather", in, [&](void* stream) {
      return api().all_gather(in.data, out.data, count(in), type_of(in.dtype), comm_, stream);
    });
  }
  std::unique_ptr<Work> reduce_scatter(ConstBuffer in, Buffer out) override {
    if (!on_gpu(in.data)) return host_->reduce_scatter(in, out);
    PARVL_CHECK(in.count == out.count * size() && in.dtype == out.dtype, "reduce_scatter: in does not fit out");
    return queue("reduce_scatter", in, [&](void* stream) {
      return api().reduce_scatter(in.data, out.data, count(out), type_of(in.dtype), nccl::kSum, comm_, stream);
    });
  }
  std::unique_ptr<Work> broadcast(Buffer values, int64_t root) override {
    if (!on_gpu(values.data)) return host_->broadcast(values, root);
    return queue("broadcast", values, [&](void* stream) {
      return api().broadcast(values.data, values.data, count(values), type_of(values.dtype), static_cast<int>(root),
                             comm_, stream);
    });
  }
  std::unique_ptr<Work> all_to_all(ConstBuffer in, absl::Span<const int64_t> in_counts, Buffer out,
                                   absl::Span<const int64_t> out_counts) override {
    if (!on_gpu(in.data) || !on_gpu(out.data)) return host_->all_to_all(in, in_counts, out, out_counts);
    const int64_t bytes = dtype_bytes(in.dtype);
    return queue("all_to_all", in, [&](void* stream) {
      api().group_start();
      const auto* from = static_cast<const char*>(in.data);
      auto* to = static_cast<char*>(out.data);
      int result = nccl::kSuccess;
      for (int peer = 0; peer < size(); ++peer) {
        const int64_t sent = in_counts[static_cast<size_t>(peer)], awaited = out_counts[static_cast<size_t>(peer)];
        const int type = type_of(in.dtype);
        if (sent > 0) result = std::max(result, api().send(from, static_cast<size_t>(sent), type, peer, comm_, stream));
        if (awaited > 0)
          result = std::max(result, api().receive(to, static_cast<size_t>(awaited), type, peer, comm_, stream));
        from += sent * bytes;
        to += awaited * bytes;
      }
      return std::max(result, api().group_end());
    });
  }
  std::unique_ptr<Work> send(ConstBuffer values, int64_t to) override {
    if (!on_gpu(values.data)) return host_->send(values, to);
    return queue_message("send", values, [&](void* stream) {
      return api().send(values.data, count(values), type_of(values.dtype), static_cast<int>(to), comm_, stream);
    });
  }
  std::unique_ptr<Work> receive(Buffer values, int64_t from) override {
    if (!on_gpu(values.data)) return host_->receive(values, from);
    return queue_message("receive", values, [&](void* stream) {
      return api().receive(values.data, count(values), type_of(values.dtype), static_cast<int>(from), comm_, stream);
    });
  }
  std::unique_ptr<Work> barrier() override {
    return std::make_unique<Barrier>(rank_, describe("barrier", {}), comm_, *host_);
  }
  void abort(const std::string& reason) override {
    const std::string text = absl::StrCat("group ", name(), " was ended: ", reason);
    host_->abort(reason);
    rank_.abort(text);
  }

  // The first calls connect the ranks; made here, no later one waits inside NCCL for a rank that does not come.
  absl::Status connect() {
    const at::Tensor values = at::zeros({2}, at::TensorOptions().dtype(at::kFloat).device(rank_.device()));
    auto* data = values.data_ptr<float>();
    PARVL_RETURN_IF_ERROR(all_reduce({data, 2, DType::kFloat32}, ReduceOp::kSum)->wait());
    if (size() == 2) {
      const int other = 1 - static_cast<int>(rank());
      const auto both_ways = [&](void* stream) {
        api().group_start();
        const int sent = api().send(data, 1, nccl::kFloat32, other, comm_, stream);
        const int received = api().receive(data + 1, 1, nccl::kFloat32, other, comm_, stream);
        return std::max({sent, received, api().group_end()});
      };
      PARVL_RETURN_IF_ERROR(queue("first message", {data, 1, DType::kFloat32}, both_ways)->wait());
    }
    return rank_.finish(describe("first call", {}), comm_);
  }

 private:
  const nccl::Api& api() const { return rank_.api(); }
  static size_t count(const ConstBuffer& values) { return static_cast<size_t>(values.count); }

  std::string describe(const char* what, const ConstBuffer& values) const {
    const std::string of =
        values.data == nullptr ? "" : absl::StrCat(" of ", values.count, " ", to_string(values.dtype));
    return absl::StrCat("group ", name(), ", rank ", rank(), ": ", what, of);
  }

  template <typename Enqueue>
  absl::Status enqueue(const char* what, const ConstBuffer& values, const at::Stream& stream, const Enqueue& start) {
    std::lock_guard one(rank_.calls());
    PARVL_RETURN_IF_ERROR(rank_.ended());
    if (values.count == 0) return absl::OkStatus();
    const int result = start(stream.native_handle());
    return result == nccl::kSuccess ? absl::OkStatus() : rank_.error(describe(what, values), result, comm_);
  }

  template <typename Enqueue>
  std::unique_ptr<Work> queue(const char* what, const ConstBuffer& values, const Enqueue& start) {
    return std::make_unique<QueuedWork>(rank_, enqueue(what, values, rank_.stream(), start));
  }

  template <typename Enqueue>
  std::unique_ptr<Work> queue_message(const char* what, const ConstBuffer& values, const Enqueue& start) {
    if (!messages_.has_value()) messages_ = gpu().getStreamFromGlobalPool(rank_.device(), /*isHighPriority=*/true);
    c10::Event ready(at::kCUDA), done(at::kCUDA);
    ready.record(rank_.stream());
    ready.block(*messages_);
    absl::Status status = enqueue(what, values, *messages_, start);
    done.record(*messages_);
    return std::make_unique<QueuedWork>(rank_, std::move(status), std::move(done));
  }

  NcclRank& rank_;
  const nccl::Comm comm_;
  std::unique_ptr<ProcessGroup> host_;
  std::optional<at::Stream> messages_;
};

class NcclCommunicator : public Communicator {
 public:
  NcclCommunicator(Communicator& host, const nccl::Api& api, at::Device device) : host_(host), rank_(api, device) {}

  int64_t rank() const override { return host_.rank(); }
  int64_t world() const override { return host_.world(); }
  std::unique_ptr<Store> make_store() override { return host_.make_store(); }

  absl::StatusOr<std::unique_ptr<ProcessGroup>> join(const GroupSpec& group) override {
    const nccl::Api& api = rank_.api();
    const std::string what = "group " + group.name + " did not come together on the GPUs";
    PARVL_ASSIGN_OR_RETURN(auto host, host_.join(group));
    nccl::UniqueId id;
    const int made = host->rank() == 0 ? api.get_unique_id(&id) : nccl::kSuccess;
    // Also after a failure, which leaves zeros there, so that the others do not wait. float64 in name alone.
    const Buffer text{id.bytes, static_cast<int64_t>(sizeof id / sizeof(double)), DType::kFloat64};
    PARVL_RETURN_IF_ERROR(with_context(host->broadcast(text, 0)->wait(), what));
    if (made != nccl::kSuccess) return rank_.error(what, made, nullptr);
    const auto is_zero = [](char c) { return c == 0; };
    if (std::all_of(std::begin(id.bytes), std::end(id.bytes), is_zero)) {
      return failed(what, ": rank ", group.ranks[0], " could not open it; its own last line says why");
    }
    nccl::Comm comm = nullptr;
    const int result = api.comm_init_rank(&comm, static_cast<int>(host->size()), id, static_cast<int>(host->rank()));
    if (result != nccl::kSuccess) return rank_.error(what, result, nullptr);
    auto out = std::make_unique<NcclGroup>(rank_, comm, std::move(host));
    PARVL_RETURN_IF_ERROR(catch_exceptions(what, [&] { return out->connect(); }));
    return std::unique_ptr<ProcessGroup>(std::move(out));
  }

 private:
  Communicator& host_;
  NcclRank rank_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Communicator>> make_nccl_communicator(Communicator& host) {
  PARVL_ASSIGN_OR_RETURN(const nccl::Api* const api, nccl::load_api());
  std::unique_ptr<Communicator> out;
  PARVL_RETURN_IF_ERROR(catch_exceptions("NCCL cannot be used", [&] {
    out = std::make_unique<NcclCommunicator>(host, *api, gpu().getDevice());
    return absl::OkStatus();
  }));
  return out;
}

}  // namespace parvl
