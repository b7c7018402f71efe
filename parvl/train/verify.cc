#include "parvl/train/verify.h"

#include <algorithm>
#include <cmath>

#include "parvl/comm/replicas.h"
#include "parvl/nn/tensor_buffer.h"

namespace parvl {
namespace {

// Whole tensors, on every rank.
std::map<std::string, at::Tensor> copies(const Trainer& trainer, at::Tensor Param::*what, DType dtype) {
  const ParamTable& params = trainer.model().params();
  const auto options = at::TensorOptions().dtype(to_scalar_type(dtype)).device(trainer.optimizer().device());
  std::map<std::string, at::Tensor> out;
  for (const Param* param : params.untied()) {
    if (!param->trains) continue;
    out[param->name] = trainer.ranks()
                           .whole(params, *param, param->*what, options)
                           .to(at::kCPU, at::kDouble, /*non_blocking=*/false, /*copy=*/true);
  }
  return out;
}

// The largest error of all tensors, and whose it is.
std::pair<double, std::string> largest_error(const std::map<std::string, at::Tensor>& got,
                                             const std::map<std::string, at::Tensor>& want) {
  double largest = 0;
  for (const auto& [name, tensor] : want) largest = std::max(largest, tensor.abs().max().item<double>());
  std::pair<double, std::string> out{0, want.empty() ? "" : want.begin()->first};
  for (const auto& [name, tensor] : want) {
    const auto found = got.find(name);
    double error = 1;
    if (found != got.end() && found->second.sizes() == tensor.sizes()) {
      const double scale = std::max(tensor.abs().max().item<double>(), 1e-5 * largest);
      const double difference = (found->second - tensor).abs().max().item<double>();
      error = scale > 0 ? difference / scale : difference;
    }
    if (!(error <= out.first)) out = {error, name};  // also NaN, which stays
    if (std::isnan(error)) break;
  }
  for (const auto& [name, tensor] : got) {
    if (want.count(name) == 0) out = {1, name};
  }
  return out;
}

double relative(double got, double want) { return std::abs(got - want) / std::max(std::abs(want), 1e-300); }

}  // namespace

absl::Status expect_equal_values(const Trainer& trainer) {
  const RunRanks& ranks = trainer.ranks();
  absl::Status status;  // after an error the rest is called all the same, so that nobody waits
  const auto check = [&](ProcessGroup* group, const std::function<bool(const Param&)>& alike) {
    if (group == nullptr) return;
    std::vector<at::Tensor> values;  // in host memory
    std::vector<NamedBuffer> buffers;
    for (const Param* param : trainer.model().params().owned()) {
      if (!alike(*param)) continue;
      values.push_back(param->value.cpu());
      buffers.push_back({param->name, buffer_of(values.back())});
    }
    status.Update(expect_equal_replicas(buffers, *group));
  };
  for (const Module module : {Module::kVisionEncoder, Module::kProjector, Module::kBackbone}) {
    const auto of_module = [&](const Param& param) { return param.module == module; };
    check(ranks.data(module), of_module);
    const auto whole = [&](const Param& param) { return of_module(param) && param.part.count == 1; };
    check(ranks.tensor(module), whole);
  }
  check(ranks.tied(), [&](const Param& param) { return ranks.on_two_stages(param); });
  return ranks.agree(status);
}

absl::StatusOr<VerifyRun> run_steps(const Recipe& recipe, const TrainerEnvironment& environment, int64_t steps) {
  Recipe here = recipe;
  here.train.steps = steps;
  here.train.resume = "never";
  here.data.eval = "";
  PARVL_ASSIGN_OR_RETURN(const auto trainer, Trainer::create(here, environment));
  VerifyRun out;
  PARVL_RETURN_IF_ERROR(catch_exceptions("the steps failed", [&]() -> absl::Status {
    const auto loader = trainer->make_loader();
    for (int64_t step = 0; step < steps; ++step) {
      const absl::StatusOr<GlobalBatch> batch = loader->next();
      PARVL_RETURN_IF_ERROR(trainer->ranks().agree(batch.status()));
      PARVL_ASSIGN_OR_RETURN(const StepResult result, trainer->compute_gradients(*batch));
      if (out.gradients.empty() && result.targets > 0) {
        trainer->optimizer().gather_grads();
        out.gradients = copies(*trainer, &Param::main_grad, trainer->optimizer().state_dtype());
        out.loss = result.loss;
        out.grad_norm = result.grad_norm;
      }
      PARVL_RETURN_IF_ERROR(trainer->update(result));
      out.losses.push_back(result.loss);
    }
    out.replicas = expect_equal_values(*trainer);
    out.weights = copies(*trainer, &Param::value, *parse_dtype(here.train.dtype));
    return absl::OkStatus();
  }));
  if (out.gradients.empty()) {
    return invalid("none of the first ", steps, " batches has a token to learn; verify with data that has answers");
  }
  return out;
}

VerifyResult compare(const VerifyRun& run, const VerifyRun& reference) {
  VerifyResult out;
  std::tie(out.max_relative_error, out.parameter) = largest_error(run.gradients, reference.gradients);
  out.weight_error = largest_error(run.weights, reference.weights).first;
  out.grad_norm_error = relative(run.grad_norm, reference.grad_norm);
  out.loss_error = relative(run.loss, reference.loss);
  for (size_t i = 0; i < reference.losses.size(); ++i) {
    if (reference.losses[i] == 0 && run.losses[i] == 0) continue;  // nothing to learn
    out.loss_error = std::max(out.loss_error, relative(run.losses[i], reference.losses[i]));
  }
  return out;
}

}  // namespace parvl
