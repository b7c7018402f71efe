// One rank of a training run that makes steps when it is told to, for measurements that alternate with another program:
// each line "run N" on standard input makes N steps and prints {"seconds", "loss"}; "phases N" prints the seconds of a
// step's parts instead, each waited for; "trace N FILE" makes N steps and writes what the GPU did meanwhile to
// FILE.RANK, as a Chrome trace. By the recipe, --set's key=value after it, and torchrun's variables.
#include <torch/csrc/autograd/profiler_kineto.h>

#include <cstdio>
#include <iostream>
#include <sstream>
#include <string>

#include "apps/communicator.h"
#include "parvl/nn/device.h"
#include "parvl/train/trainer.h"

namespace parvl {
namespace {

class Steps {
 public:
  Steps(Trainer& trainer, const Clock& clock) : trainer_(trainer), clock_(clock), loader_(trainer.make_loader()) {}

  absl::StatusOr<Json> run(int64_t steps) {
    const double begin = clock_.now_seconds();
    double loss = 0;
    for (int64_t i = 0; i < steps; ++i) {
      PARVL_ASSIGN_OR_RETURN(const GlobalBatch batch, next());
      PARVL_ASSIGN_OR_RETURN(const StepResult result, trainer_.train_step(batch));
      loss = result.loss;
    }
    synchronize(device());
    return Json{{"seconds", clock_.now_seconds() - begin}, {"loss", loss}, {"memory_bytes", memory_in_use(device())}};
  }

  absl::StatusOr<Json> phases(int64_t steps) {
    Json out = Json::object();
    const auto timed = [&](const char* name, const std::function<absl::Status()>& body) {
      const double begin = clock_.now_seconds();
      const absl::Status status = body();
      synchronize(device());
      out[name] = out.value(name, 0.0) + (clock_.now_seconds() - begin) / static_cast<double>(steps);
      return status;
    };
    const auto call = [](const auto& body) {
      body();
      return absl::OkStatus();
    };
    for (int64_t i = 0; i < steps; ++i) {
      GlobalBatch batch;
      PARVL_RETURN_IF_ERROR(timed("batch", [&]() -> absl::Status {
        PARVL_ASSIGN_OR_RETURN(batch, next());
        return absl::OkStatus();
      }));
      StepResult result;
      PARVL_RETURN_IF_ERROR(timed("gradients", [&]() -> absl::Status {
        PARVL_ASSIGN_OR_RETURN(result, trainer_.compute_gradients(batch));
        return absl::OkStatus();
      }));
      Optimizer& optimizer = trainer_.optimizer();
      PARVL_RETURN_IF_ERROR(timed("update", [&] { return trainer_.update(result); }));
      // Parts of the two above, once more by themselves; the gradients are of no use afterwards.
      PARVL_RETURN_IF_ERROR(timed("of which reduce", [&] { return call([&] { optimizer.reduce_grads(); }); }));
      PARVL_RETURN_IF_ERROR(timed("of which norm", [&] { return call([&] { optimizer.grad_norm(); }); }));
      PARVL_RETURN_IF_ERROR(timed("of which zero", [&] { return call([&] { optimizer.zero_grad(); }); }));
    }
    return out;
  }

  absl::StatusOr<Json> trace(int64_t steps, const std::string& path) {
    namespace profiler = torch::profiler::impl;
    const profiler::ProfilerConfig config(profiler::ProfilerState::KINETO);
    const std::set<profiler::ActivityType> activities = {profiler::ActivityType::CUDA};
    torch::autograd::profiler::prepareProfiler(config, activities);
    torch::autograd::profiler::enableProfiler(config, activities);
    absl::StatusOr<Json> out = run(steps);
    torch::autograd::profiler::disableProfiler()->save(absl::StrCat(path, ".", trainer_.ranks().rank()));
    return out;
  }

 private:
  at::Device device() const { return trainer_.optimizer().device(); }
  absl::StatusOr<GlobalBatch> next() {
    absl::StatusOr<GlobalBatch> batch = loader_->next();
    PARVL_RETURN_IF_ERROR(trainer_.ranks().agree(batch.status()));
    return batch;
  }

  Trainer& trainer_;
  const Clock& clock_;
  std::unique_ptr<BatchLoader> loader_;
};

absl::Status serve(const std::string& path, const std::vector<std::string>& overrides) {
  const RealClock clock;
  PARVL_ASSIGN_OR_RETURN(const Recipe recipe, load_recipe(path, overrides));
  PARVL_ASSIGN_OR_RETURN(const auto communicator, communicator_from_environment());
  TrainerEnvironment environment;
  environment.clock = &clock;
  environment.communicator = communicator.get();
  PARVL_ASSIGN_OR_RETURN(environment.local_rank, local_rank_from_environment());
  PARVL_ASSIGN_OR_RETURN(environment.checks, checks_from_environment());
  environment.write = [](std::string_view) {};
  PARVL_ASSIGN_OR_RETURN(const auto trainer, Trainer::create(recipe, environment));
  Steps steps(*trainer, clock);
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string what, path;
    int64_t count = 0;
    words >> what >> count >> path;
    absl::StatusOr<Json> result;
    PARVL_RETURN_IF_ERROR(catch_exceptions("steps failed", [&] {
      result = what == "phases" ? steps.phases(count) : what == "trace" ? steps.trace(count, path) : steps.run(count);
      return result.status();
    }));
    if (trainer->ranks().is_first()) std::printf("%s\n", result->dump().c_str());
    std::fflush(stdout);
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace parvl

int main(int count, char** arguments) {
  if (count < 2) return 2;
  const absl::Status status = parvl::serve(arguments[1], {arguments + 2, arguments + count});
  if (!status.ok()) std::fprintf(stderr, "steps_bench: %s\n", std::string(status.message()).c_str());
  return parvl::exit_code(status);
}
