// One rank of three over Gloo, of which one may do something else than the others; what tests/e2e/comm_*.py start.
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "apps/communicator.h"
#include "parvl/comm/comm_site.h"

namespace parvl {
namespace {

void say(const absl::Status& status) {
  std::fprintf(stderr, "comm_probe: %s\n", status.ok() ? "fine" : std::string(status.message()).c_str());
}

struct Probe {
  ProcessGroup& world;
  std::string fault;
  bool is_culprit;
  int64_t count;

  absl::Status all_reduce(ProcessGroup& group, int64_t values, DType dtype, ReduceOp op) const {
    std::vector<double> data(static_cast<size_t>(values) + 1);
    return group.all_reduce({data.data(), values, dtype}, op)->wait();
  }
  absl::Status gather(int64_t values) const {
    std::vector<double> in(static_cast<size_t>(values)), out(static_cast<size_t>(values * world.size()));
    return world.all_gather({in.data(), values, DType::kFloat64}, {out.data(), values * world.size(), DType::kFloat64})
        ->wait();
  }

  // The step that the culprit makes otherwise.
  absl::Status step() const {
    const CommSite site("mlp");
    const bool other = is_culprit;
    if (other && fault == "skip") return absl::OkStatus();
    if (other && fault == "stop") ::raise(SIGSTOP);
    if (other && fault == "kill") ::raise(SIGKILL);
    if (other && fault == "sleep") std::this_thread::sleep_for(std::chrono::hours(1));
    if (other && fault == "abort") {
      world.abort("rank 1 has no more memory");
      return absl::AbortedError("it was me");
    }
    if (fault == "reorder") {
      PARVL_RETURN_IF_ERROR(other ? gather(count) : all_reduce(world, count, DType::kFloat32, ReduceOp::kSum));
      return other ? all_reduce(world, count, DType::kFloat32, ReduceOp::kSum) : gather(count);
    }
    if (fault == "kind" && other) return gather(count);
    if (fault == "root") {
      std::vector<float> data(static_cast<size_t>(count));
      return world.broadcast({data.data(), count, DType::kFloat32}, other ? 2 : 0)->wait();
    }
    if (fault == "message") {
      std::vector<float> data(static_cast<size_t>(count) + 1);
      if (world.rank() == 1) return world.send({data.data(), count + 1, DType::kFloat32}, 2)->wait();
      if (world.rank() == 2) return world.receive({data.data(), count, DType::kFloat32}, 1)->wait();
      return absl::OkStatus();
    }
    const int64_t values = other && fault == "shape" ? count - 1 : count;
    // As many bytes, so that Gloo sees nothing.
    if (other && fault == "dtype") return all_reduce(world, values / 2, DType::kFloat64, ReduceOp::kSum);
    return all_reduce(world, values, DType::kFloat32, other && fault == "op" ? ReduceOp::kMax : ReduceOp::kSum);
  }
};

absl::Status run(Communicator& ranks, CheckedCommunicator& checked, const std::string& fault, int64_t count) {
  PARVL_ASSIGN_OR_RETURN(const auto world, checked.join({"world", {0, 1, 2}}));
  const Probe probe{*world, fault, ranks.rank() == 1, count};
  for (int i = 0; i < 3; ++i) {
    PARVL_RETURN_IF_ERROR(probe.all_reduce(*world, 8, DType::kFloat32, ReduceOp::kSum));
    PARVL_RETURN_IF_ERROR(checked.compare(*world));
  }
  PARVL_RETURN_IF_ERROR(probe.step());
  return checked.compare(*world);
}

int probe(char** arguments) {
  const auto ranks = communicator_from_environment();
  auto checks = checks_from_environment();
  if (!ranks.ok() || !checks.ok()) {
    say(ranks.ok() ? checks.status() : ranks.status());
    return 1;
  }
  const RealClock clock;
  checks->clock = &clock;
  CheckedCommunicator checked(**ranks, *checks);
  const absl::Status status = run(**ranks, checked, arguments[1], std::atoll(arguments[2]));
  say(status);
  return exit_code(status);
}

}  // namespace
}  // namespace parvl

// FAULT COUNT
int main(int count, char** arguments) { return count == 3 ? parvl::probe(arguments) : 2; }
