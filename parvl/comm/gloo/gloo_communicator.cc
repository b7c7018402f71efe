#include "parvl/comm/gloo/gloo_communicator.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "parvl/base/check.h"

namespace parvl {
namespace {

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1e3));
}

at::ScalarType scalar_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return at::kFloat;
    case DType::kFloat64:
      return at::kDouble;
    case DType::kBFloat16:
      return at::kBFloat16;
    case DType::kFloat16:
      return at::kHalf;
  }
  PARVL_CHECK(false, "no such dtype");
  return at::kFloat;
}

at::Tensor tensor(const ConstBuffer& buffer) {
  return at::from_blob(const_cast<void*>(buffer.data), {buffer.count}, scalar_type(buffer.dtype));
}

// A connection of its own to the store of all ranks.
class GlooStore : public Store {
 public:
  GlooStore(c10::intrusive_ptr<c10d::Store> store, std::string where, bool is_here)
      : store_(std::move(store)), where_(std::move(where)), is_here_(is_here) {}

  absl::Status set(const std::string& key, const std::string& value) override {
    return reach([&] { store_->set(key, value); });
  }
  absl::StatusOr<std::optional<std::string>> look(const std::string& key) override {
    std::optional<std::string> out;
    PARVL_RETURN_IF_ERROR(reach([&] {
      if (store_->check({key})) out = store_->get_to_str(key);
    }));
    return out;
  }
  absl::StatusOr<std::string> get(const std::string& key, double timeout_s) override {
    std::string out;
    bool late = false;
    PARVL_RETURN_IF_ERROR(reach([&] {
      try {
        store_->wait({key}, milliseconds(timeout_s));
      } catch (const c10::DistStoreError&) {
        late = !store_->check({key});  // throws when the store is gone
      }
      if (!late) out = store_->get_to_str(key);
    }));
    if (!late) return out;
    return absl::DeadlineExceededError(absl::StrCat(where_, ": nobody has set ", key, " within ", timeout_s, " s"));
  }
  absl::Status erase(const std::string& key) override {
    return reach([&] { store_->deleteKey(key); });
  }
  std::string where() const override { return where_; }
  bool ends_with_this_process() const override { return is_here_; }

 private:
  absl::Status reach(const std::function<void()>& body) {
    return catch_exceptions(where_ + " cannot be reached", [&] {
      body();
      return absl::OkStatus();
    });
  }

  c10::intrusive_ptr<c10d::Store> store_;
  const std::string where_;
  const bool is_here_;
};

using Start = std::function<c10::intrusive_ptr<c10d::Work>()>;

class GlooWork : public Work {
 public:
  GlooWork(std::string what, const Start& start) : what_(std::move(what)) {
    status_ = catch_exceptions(what_, [&] {
      work_ = start();
      return absl::OkStatus();
    });
  }
  explicit GlooWork(absl::Status status) : status_(std::move(status)) {}

  absl::Status wait() override {
    if (!status_.ok() || work_ == nullptr) return status_;
    return catch_exceptions(what_, [&] {
      work_->wait();
      return absl::OkStatus();
    });
  }

 private:
  std::string what_;
  c10::intrusive_ptr<c10d::Work> work_;
  absl::Status status_;
};

class GlooGroup : public ProcessGroup {
 public:
  GlooGroup(std::string name, c10::intrusive_ptr<c10d::ProcessGroupGloo> group)
      : name_(std::move(name)), group_(std::move(group)) {}

  int64_t rank() const override { return group_->getRank(); }
  int64_t size() const override { return group_->getSize(); }
  const std::string& name() const override { return name_; }

  std::unique_ptr<Work> all_reduce(Buffer values, ReduceOp op) override {
    return call("all_reduce", values, [&] {
      std::vector<at::Tensor> tensors = {tensor(values)};
      c10d::AllreduceOptions options;
      options.reduceOp = op == ReduceOp::kSum ? c10d::ReduceOp::SUM : c10d::ReduceOp::MAX;
      return group_->allreduce(tensors, options);
    });
  }
  std::unique_ptr<Work> all_gather(ConstBuffer in, Buffer out) override {
    PARVL_CHECK(out.count == in.count * size() && in.dtype == out.dtype, "all_gather: out does not fit in");
    return call("all_gather", in, [&] {
      at::Tensor to = tensor(out), from = tensor(in);
      return group_->_allgather_base(to, from);
    });
  }
  std::unique_ptr<Work> reduce_scatter(ConstBuffer in, Buffer out) override {
    PARVL_CHECK(in.count == out.count * size() && in.dtype == out.dtype, "reduce_scatter: in does not fit out");
    return call("reduce_scatter", in, [&] {
      at::Tensor to = tensor(out), from = tensor(in);
      return group_->_reduce_scatter_base(to, from);
    });
  }
  std::unique_ptr<Work> broadcast(Buffer values, int64_t root) override {
    return call("broadcast", values, [&] {
      std::vector<at::Tensor> tensors = {tensor(values)};
      c10d::BroadcastOptions options;
      options.rootRank = root;
      return group_->broadcast(tensors, options);
    });
  }
  std::unique_ptr<Work> all_to_all(ConstBuffer in, absl::Span<const int64_t> in_counts, Buffer out,
                                   absl::Span<const int64_t> out_counts) override {
    return call("all_to_all", in, [&] {
      at::Tensor to = tensor(out), from = tensor(in);
      std::vector<int64_t> sent(in_counts.begin(), in_counts.end()), awaited(out_counts.begin(), out_counts.end());
      return group_->alltoall_base(to, from, awaited, sent);
    });
  }
  std::unique_ptr<Work> send(ConstBuffer values, int64_t to) override {
    return call(absl::StrCat("send to rank ", to), values, [&] {
      std::vector<at::Tensor> tensors = {tensor(values)};
      return group_->send(tensors, static_cast<int>(to), /*tag=*/0);
    });
  }
  std::unique_ptr<Work> receive(Buffer values, int64_t from) override {
    return call(absl::StrCat("receive from rank ", from), values, [&] {
      std::vector<at::Tensor> tensors = {tensor(values)};
      return group_->recv(tensors, static_cast<int>(from), /*tag=*/0);
    });
  }
  std::unique_ptr<Work> barrier() override {
    return call("barrier", {}, [&] { return group_->barrier(); });
  }
  // Gloo has no way to end a call; the others hear of it when this process ends and its sockets close.
  void abort(const std::string& reason) override {
    std::lock_guard lock(mutex_);
    if (aborted_.empty()) aborted_ = absl::StrCat("group ", name_, " was ended: ", reason);
  }

 private:
  std::unique_ptr<Work> call(const std::string& what, const ConstBuffer& values, const Start& start) {
    std::string text = absl::StrCat("group ", name_, ", rank ", rank(), ": ", what);
    if (values.data != nullptr) absl::StrAppend(&text, " of ", values.count, " ", to_string(values.dtype));
    {
      std::lock_guard lock(mutex_);
      if (!aborted_.empty()) return std::make_unique<GlooWork>(absl::AbortedError(aborted_));
    }
    return std::make_unique<GlooWork>(text + " failed", start);
  }

  const std::string name_;
  c10::intrusive_ptr<c10d::ProcessGroupGloo> group_;
  std::mutex mutex_;
  std::string aborted_;
};

class GlooCommunicator : public Communicator {
 public:
  GlooCommunicator(GlooOptions options, c10::intrusive_ptr<c10d::Store> store)
      : options_(std::move(options)), store_(std::move(store)) {}

  int64_t rank() const override { return options_.rank; }
  int64_t world() const override { return options_.world; }

  absl::StatusOr<std::unique_ptr<ProcessGroup>> join(const GroupSpec& group) override {
    const auto me = std::find(group.ranks.begin(), group.ranks.end(), options_.rank);
    PARVL_CHECK(me != group.ranks.end(), "a rank joins a group that it is not in");
    std::unique_ptr<ProcessGroup> out;
    PARVL_RETURN_IF_ERROR(catch_exceptions("group " + group.name + " did not come together", [&] {
      const auto options = c10d::ProcessGroupGloo::Options::create(milliseconds(options_.deadline_s));
      options->devices.push_back(device());
      options->threads = 1;  // calls of one group run in their order
      const auto store = c10::make_intrusive<c10d::PrefixStore>(options_.prefix + "/" + group.name, store_);
      auto gloo = c10::make_intrusive<c10d::ProcessGroupGloo>(store, static_cast<int>(me - group.ranks.begin()),
                                                              static_cast<int>(group.ranks.size()), options);
      gloo->setTimeout(milliseconds(options_.call_deadline_s));
      out = std::make_unique<GlooGroup>(group.name, std::move(gloo));
      return absl::OkStatus();
    }));
    return out;
  }

  std::unique_ptr<Store> make_store() override {
    const std::string prefix = absl::StrCat(options_.prefix, "/stores/", stores_made_++);
    const std::string holder = options_.serve_store ? "rank 0's store" : "the launcher's store";
    return std::make_unique<GlooStore>(c10::make_intrusive<c10d::PrefixStore>(prefix, store_->clone()),
                                       absl::StrCat(holder, " at ", options_.host, ":", options_.port),
                                       options_.serve_store && options_.rank == 0);
  }

 private:
  std::shared_ptr<gloo::transport::Device> device() const {
    if (!options_.address.empty()) return c10d::ProcessGroupGloo::createDeviceForHostname(options_.address);
    const bool loopback = options_.host == "localhost" || options_.host.rfind("127.", 0) == 0;
    return loopback ? c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1")
                    : c10d::ProcessGroupGloo::createDefaultDevice();
  }

  GlooOptions options_;
  c10::intrusive_ptr<c10d::Store> store_;
  int64_t stores_made_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Communicator>> make_gloo_communicator(const GlooOptions& options) {
  std::unique_ptr<Communicator> out;
  const std::string what =
      absl::StrCat("the store at ", options.host, ":", options.port, ", or a rank that meets there, does not answer");
  PARVL_RETURN_IF_ERROR(catch_exceptions(what, [&] {
    c10d::TCPStoreOptions store;
    store.port = static_cast<uint16_t>(options.port);
    store.isServer = options.serve_store && options.rank == 0;
    store.timeout = milliseconds(options.deadline_s);
    store.waitWorkers = false;
    const auto shared = c10::make_intrusive<c10d::TCPStore>(options.host, store);
    if (store.isServer && options.on_listening) options.on_listening(shared->getPort());
    // All are here before any group is made.
    std::vector<std::string> everybody;
    for (int64_t rank = 0; rank < options.world; ++rank) {
      everybody.push_back(absl::StrCat(options.prefix, "/here/", rank));
    }
    shared->set(everybody[static_cast<size_t>(options.rank)], std::vector<uint8_t>{1});
    shared->wait(everybody, store.timeout);
    out = std::make_unique<GlooCommunicator>(options, shared);
    return absl::OkStatus();
  }));
  return out;
}

}  // namespace parvl
