// One rank of two with a GPU each: every call's result, then a call that rank 1 makes otherwise; what
// tests/e2e/train_gpus.py starts. Prints the last line's message and the seconds from the fault on.
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <string>

#include "apps/communicator.h"
#include "parvl/comm/comm_site.h"
#include "parvl/comm/nccl/nccl_communicator.h"
#include "parvl/nn/device.h"
#include "parvl/nn/tensor_buffer.h"

namespace parvl {
namespace {

class Probe {
 public:
  Probe(CheckedCommunicator& ranks, ProcessGroup& world, ProcessGroup& other, at::Device device)
      : ranks_(ranks), world_(world), other_(other), device_(device), me_(static_cast<double>(world.rank())) {}

  // All calls with values that tell who sent them, in all types.
  absl::Status values() {
    for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
      PARVL_RETURN_IF_ERROR(collectives(type));
      PARVL_RETURN_IF_ERROR(messages(type));
    }
    double host = me_ + 1;  // memory of the host goes another way
    PARVL_RETURN_IF_ERROR(world_.all_reduce({&host, 1, DType::kFloat64}, ReduceOp::kSum)->wait());
    if (host != 3) return failed("all_reduce on the host gave ", host);
    PARVL_RETURN_IF_ERROR(many());
    PARVL_RETURN_IF_ERROR(world_.barrier()->wait());
    return ranks_.compare(world_);
  }

  absl::Status fault(const std::string& what) {
    PARVL_RETURN_IF_ERROR(ranks_.compare(world_));
    const bool culprit = world_.rank() == 1;
    const at::Tensor x = tensor(at::kFloat, 6, 1);
    const CommSite site("mlp");
    if (what == "shape") {
      const at::Tensor mine = culprit ? x.narrow(0, 0, 5) : x;
      PARVL_RETURN_IF_ERROR(other_.all_reduce(buffer_of(mine), ReduceOp::kSum)->wait());
    } else if (what == "skip" && !culprit) {
      PARVL_RETURN_IF_ERROR(other_.all_reduce(buffer_of(x), ReduceOp::kSum)->wait());
    } else if (what == "message" && !culprit) {
      PARVL_RETURN_IF_ERROR(other_.send(buffer_of(x), 1)->wait());
    } else if (what == "abort" && culprit) {
      other_.abort("rank 1 has no more memory");
    } else if (what == "stop" && culprit) {
      ::raise(SIGSTOP);
    }
    if (what == "abort" && !culprit) PARVL_RETURN_IF_ERROR(other_.all_reduce(buffer_of(x), ReduceOp::kSum)->wait());
    PARVL_RETURN_IF_ERROR(world_.barrier()->wait());
    return ranks_.compare(world_);  // what NCCL's buffers have let through
  }

 private:
  at::Tensor tensor(at::ScalarType type, int64_t count, double value) const {
    return at::full({count}, value, at::TensorOptions().dtype(type).device(device_));
  }
  absl::Status expect(const at::Tensor& got, const std::vector<double>& want, const std::string& call) {
    PARVL_RETURN_IF_ERROR(world_.barrier()->wait());
    const at::Tensor values = got.to(at::kCPU, at::kDouble);
    for (size_t i = 0; i < want.size(); ++i) {
      const double value = values[static_cast<int64_t>(i)].item<double>();
      if (value != want[i]) return failed(call, " gave ", value, " at ", i, ", not ", want[i]);
    }
    return absl::OkStatus();
  }

  absl::Status collectives(at::ScalarType type) {
    const std::string name = c10::toString(type);
    const at::Tensor sum = tensor(type, 3, me_ + 1), most = tensor(type, 3, me_ + 1), all = tensor(type, 4, 0);
    PARVL_RETURN_IF_ERROR(world_.all_reduce(buffer_of(sum), ReduceOp::kSum)->wait());
    PARVL_RETURN_IF_ERROR(expect(sum, {3, 3, 3}, "all_reduce (sum) of " + name));
    PARVL_RETURN_IF_ERROR(world_.all_reduce(buffer_of(most), ReduceOp::kMax)->wait());
    PARVL_RETURN_IF_ERROR(expect(most, {2, 2, 2}, "all_reduce (max) of " + name));
    PARVL_RETURN_IF_ERROR(world_.all_gather(buffer_of(tensor(type, 2, me_ + 1)), buffer_of(all))->wait());
    PARVL_RETURN_IF_ERROR(expect(all, {1, 1, 2, 2}, "all_gather of " + name));
    const at::Tensor own = tensor(type, 2, 0), root = tensor(type, 2, me_);
    PARVL_RETURN_IF_ERROR(world_.reduce_scatter(buffer_of(all), buffer_of(own))->wait());
    PARVL_RETURN_IF_ERROR(expect(own, {2 * me_ + 2, 2 * me_ + 2}, "reduce_scatter of " + name));
    PARVL_RETURN_IF_ERROR(world_.broadcast(buffer_of(root), 1)->wait());
    return expect(root, {1, 1}, "broadcast of " + name);
  }

  // Unlike parts, and messages both ways at once, in one group.
  absl::Status messages(at::ScalarType type) {
    const std::string name = c10::toString(type);
    const std::vector<int64_t> counts = me_ == 0 ? std::vector<int64_t>{1, 2} : std::vector<int64_t>{2, 0};
    const at::Tensor in = tensor(type, counts[0] + counts[1], me_ + 1), out = tensor(type, counts[0] + counts[1], 0);
    PARVL_RETURN_IF_ERROR(world_.all_to_all(buffer_of(in), counts, buffer_of(out), counts)->wait());
    const auto parts = me_ == 0 ? std::vector<double>{1, 2, 2} : std::vector<double>{1, 1};
    PARVL_RETURN_IF_ERROR(expect(out, parts, "all_to_all of " + name));
    // Rank 0 sends two in a row before rank 1 sends its first: no stream may wait for what the other does later.
    const at::Tensor a = tensor(type, 5, 4), b = tensor(type, 5, 5), back = tensor(type, 5, 6),
                     got = tensor(type, 5, 0);
    if (me_ == 0) {
      const auto first = world_.send(buffer_of(a), 1);
      PARVL_RETURN_IF_ERROR(first->wait());
      const auto second = other_.receive(buffer_of(got), 1);
      PARVL_RETURN_IF_ERROR(world_.send(buffer_of(b), 1)->wait());
      PARVL_RETURN_IF_ERROR(second->wait());
      return expect(got, {6, 6, 6, 6, 6}, "a message of " + name + " to rank 0");
    }
    PARVL_RETURN_IF_ERROR(world_.receive(buffer_of(got), 0)->wait());
    const auto sent = other_.send(buffer_of(back), 0);
    PARVL_RETURN_IF_ERROR(world_.receive(buffer_of(a), 0)->wait());
    PARVL_RETURN_IF_ERROR(sent->wait());
    PARVL_RETURN_IF_ERROR(expect(got, {4, 4, 4, 4, 4}, "the first message of " + name));
    return absl::OkStatus();
  }

  // Queued behind each other without the host waiting in between.
  absl::Status many() {
    const at::Tensor x = tensor(at::kFloat, 1 << 20, 1);
    for (int i = 0; i < 20; ++i) {
      PARVL_RETURN_IF_ERROR(world_.all_reduce(buffer_of(x), ReduceOp::kSum)->wait());
      x.mul_(0.5);
    }
    return expect(x, {1, 1}, "20 calls in a row");
  }

  CheckedCommunicator& ranks_;
  ProcessGroup &world_, &other_;
  const at::Device device_;
  const double me_;
};

absl::Status run(const std::string& what, double& seconds) {
  const RealClock clock;
  PARVL_ASSIGN_OR_RETURN(const auto host, communicator_from_environment());
  PARVL_ASSIGN_OR_RETURN(auto checks, checks_from_environment());
  PARVL_ASSIGN_OR_RETURN(const int64_t local_rank, local_rank_from_environment());
  PARVL_ASSIGN_OR_RETURN(const at::Device device, select_device("cuda", local_rank));
  PARVL_ASSIGN_OR_RETURN(const auto gpus, make_nccl_communicator(*host));
  checks.clock = &clock;
  CheckedCommunicator checked(*gpus, checks);
  PARVL_ASSIGN_OR_RETURN(const auto world, checked.join({"world", {0, 1}}));
  PARVL_ASSIGN_OR_RETURN(const auto other, checked.join({"other", {0, 1}}));
  Probe probe(checked, *world, *other, device);
  return catch_exceptions("a call threw", [&] {
    const double begin = clock.now_seconds();
    const absl::Status status = what == "values" ? probe.values() : probe.fault(what);
    seconds = clock.now_seconds() - begin;
    return status;
  });
}

}  // namespace
}  // namespace parvl

// values | shape | skip | message | abort | stop
int main(int count, char** arguments) {
  if (count != 2) return 2;
  double seconds = 0;
  const absl::Status status = parvl::run(arguments[1], seconds);
  std::fprintf(stderr, "after %.2f s\ngpu_probe: %s\n", seconds,
               status.ok() ? "fine" : std::string(status.message()).c_str());
  return parvl::exit_code(status);
}
