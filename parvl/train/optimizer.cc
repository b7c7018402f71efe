#include "parvl/train/optimizer.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace parvl {
namespace {

absl::Status check_patterns(const ParamTable& params, const Recipe& recipe) {
  const auto check = [&](const std::string& pattern, const char* key) -> absl::Status {
    for (const auto& param : params.all()) {
      if (matches_pattern(pattern, param->name)) return absl::OkStatus();
    }
    return invalid(key, " pattern '", pattern, "' matches no parameter; names look like '", params.all().front()->name,
                   "' and '", params.all().back()->name, "' (parvl model inspect lists them)");
  };
  for (const std::string& pattern : recipe.train.freeze) PARVL_RETURN_IF_ERROR(check(pattern, "train.freeze"));
  for (const OptimGroup& group : recipe.optim.groups) PARVL_RETURN_IF_ERROR(check(group.match, "optim.groups"));
  return absl::OkStatus();
}

// Whether the pattern matches the parameter's name or that of one tied to it.
bool matches(const std::string& pattern, const ParamTable& params, const Param& param) {
  return std::any_of(params.all().begin(), params.all().end(), [&](const auto& other) {
    return (other.get() == &param || other->tied_to == &param) && matches_pattern(pattern, other->name);
  });
}

bool frozen(const ParamTable& params, const Param& param, const TrainRecipe& train) {
  return std::any_of(train.freeze.begin(), train.freeze.end(),
                     [&](const std::string& pattern) { return matches(pattern, params, param); });
}

// The learning rate and weight decay of a parameter; the first group that matches decides.
std::pair<double, double> settings(const ParamTable& params, const Param& param, const OptimRecipe& optim) {
  double lr = optim.lr, decay = optim.weight_decay;
  for (const OptimGroup& group : optim.groups) {
    if (!matches(group.match, params, param)) continue;
    if (group.lr >= 0) lr = group.lr;
    if (group.weight_decay >= 0) decay = group.weight_decay;
    break;
  }
  return {lr, param.is_matrix() ? decay : 0.0};
}

void allocate_group(OptimGroupState& group, const OptimRecipe& optim, at::ScalarType master_type,
                    at::ScalarType value_type, at::Device device) {
  int64_t total = 0;
  for (const Param* param : group.params) {
    group.offsets.push_back(total);
    total += param->numel();
  }
  const auto options = at::TensorOptions().dtype(master_type).device(device);
  group.master = at::empty({total}, options);
  group.grad = at::zeros({total}, options);
  group.value = value_type == master_type ? group.master : at::empty({total}, options.dtype(value_type));
  if (optim.name == "adamw") {
    group.moment1 = at::zeros({total}, options);
    group.moment2 = at::zeros({total}, options);
    group.updates = at::zeros({}, options.dtype(at::kFloat));
  } else if (optim.momentum != 0) {
    group.moment1 = at::zeros({total}, options);
  }
  for (size_t i = 0; i < group.params.size(); ++i) {
    Param& param = *group.params[i];
    const auto view = [&](const at::Tensor& flat) {
      return flat.narrow(0, group.offsets[i], param.numel()).view(param.shape);
    };
    param.master = view(group.master);
    param.main_grad = view(group.grad);
    param.value = value_type == master_type ? param.master : view(group.value);
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<Optimizer>> Optimizer::create(ParamTable& params, const Recipe& recipe, DType dtype,
                                                             at::Device device) {
  PARVL_RETURN_IF_ERROR(check_patterns(params, recipe));
  const at::ScalarType value_type = to_scalar_type(dtype);
  const at::ScalarType master_type = dtype == DType::kFloat64 ? at::kDouble : at::kFloat;
  std::unique_ptr<Optimizer> optimizer(new Optimizer(recipe.optim));
  std::map<std::tuple<Module, double, double>, size_t> index;  // one module a group: later each has its own mesh
  for (Param* param : params.owned()) {
    if (frozen(params, *param, recipe.train)) {
      param->value = at::empty(param->shape, at::TensorOptions().dtype(value_type).device(device));
      param->master = param->value;
      param->main_grad = at::Tensor();
      continue;
    }
    const auto [lr, weight_decay] = settings(params, *param, recipe.optim);
    auto [it, added] = index.emplace(std::tuple(param->module, lr, weight_decay), optimizer->groups_.size());
    if (added) {
      optimizer->groups_.emplace_back();
      optimizer->groups_.back().lr = lr;
      optimizer->groups_.back().weight_decay = weight_decay;
    }
    optimizer->groups_[it->second].params.push_back(param);
  }
  if (optimizer->groups_.empty()) return invalid("train.freeze leaves no parameter to train");
  for (OptimGroupState& group : optimizer->groups_)
    allocate_group(group, recipe.optim, master_type, value_type, device);
  params.link_tied();
  return optimizer;
}

void Optimizer::zero_grad() {
  for (OptimGroupState& group : groups_) group.grad.zero_();
}

at::Tensor Optimizer::grad_norm() const {
  std::vector<at::Tensor> norms;
  for (const OptimGroupState& group : groups_)
    norms.push_back(at::linalg_vector_norm(group.grad, 2, at::OptionalIntArrayRef{}, false, at::kDouble));
  return at::linalg_vector_norm(at::stack(norms), 2);
}

void Optimizer::scale_grads(const at::Tensor& factor) {
  for (OptimGroupState& group : groups_) group.grad.mul_(factor.to(group.grad.scalar_type()));
}

void Optimizer::step(double lr_factor) {
  at::NoGradGuard no_grad;
  for (OptimGroupState& group : groups_) {
    const double lr = group.lr * lr_factor;
    if (recipe_.name == "adamw") {
      group.updates.add_(1);
      at::_fused_adamw_({group.master}, {group.grad}, {group.moment1}, {group.moment2}, {}, {group.updates}, lr,
                        recipe_.betas.first, recipe_.betas.second, group.weight_decay, recipe_.eps, /*amsgrad=*/false,
                        /*maximize=*/false);
      continue;
    }
    // Weight decay adds to the gradient, then momentum (Sutskever et al., 2013, in PyTorch's form).
    at::Tensor update = group.grad;
    if (group.weight_decay != 0) update = update.add(group.master, group.weight_decay);
    if (recipe_.momentum != 0) update = group.moment1.mul_(recipe_.momentum).add_(update);
    group.master.sub_(update, lr);
  }
  ++steps_done_;
  ++updates_done_;
  refresh_values();
}

void Optimizer::refresh_values() {
  at::NoGradGuard no_grad;
  for (OptimGroupState& group : groups_) {
    if (!group.value.is_same(group.master)) group.value.copy_(group.master);
  }
}

void Optimizer::set_progress(int64_t steps_done, int64_t updates_done) {
  steps_done_ = steps_done;
  updates_done_ = updates_done;
  for (OptimGroupState& group : groups_) {
    if (group.updates.defined()) group.updates.fill_(static_cast<double>(updates_done));
  }
}

}  // namespace parvl
