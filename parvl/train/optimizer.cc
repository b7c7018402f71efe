#include "parvl/train/optimizer.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "parvl/comm/comm_site.h"
#include "parvl/nn/tensor_buffer.h"
#include "parvl/train/param_settings.h"

namespace parvl {
namespace {

std::vector<std::string> names_of(const ParamTable& params, const Param& param) {
  std::vector<std::string> out;
  for (const auto& other : params.all()) {
    if (other.get() == &param || other->tied_to == &param) out.push_back(other->name);
  }
  return out;
}

void allocate_group(OptimGroupState& group, const OptimRecipe& optim, bool zero1, at::ScalarType master_type,
                    at::ScalarType value_type, at::Device device) {
  int64_t total = 0;
  for (const Param* param : group.params) {
    group.offsets.push_back(total);
    total += param->part_numel();
  }
  const int64_t parts = group.data == nullptr || !zero1 ? 1 : group.data->size();
  group.part_size = (total + parts - 1) / parts;
  group.part_begin = parts == 1 ? 0 : group.data->rank() * group.part_size;
  total = group.part_size * parts;
  const auto options = at::TensorOptions().dtype(master_type).device(device);
  group.grad = at::zeros({total}, options);
  // Masters that will be cut are whole for as long as weights are read, when there are no gradients yet.
  group.master = parts > 1 && value_type != master_type ? group.grad : at::zeros({total}, options);
  group.value = value_type == master_type ? group.master : at::zeros({total}, options.dtype(value_type));
  if (optim.name == "adamw") {
    group.moment1 = at::zeros({group.part_size}, options);
    group.moment2 = at::zeros({group.part_size}, options);
    group.updates = at::zeros({}, options.dtype(at::kFloat));
  } else if (optim.momentum != 0) {
    group.moment1 = at::zeros({group.part_size}, options);
  }
  for (size_t i = 0; i < group.params.size(); ++i) {
    Param& param = *group.params[i];
    const auto view = [&](const at::Tensor& flat) {
      return flat.narrow(0, group.offsets[i], param.part_numel()).view(param.part_shape());
    };
    param.master = view(group.master);
    param.main_grad = view(group.grad);
    param.value = value_type == master_type ? param.master : view(group.value);
  }
}

// The part of a flat tensor that this rank updates.
at::Tensor own(const OptimGroupState& group, const at::Tensor& flat) {
  return flat.narrow(0, group.part_begin, group.part_size);
}

// The same of the masters, which may be cut already.
at::Tensor own_master(const OptimGroupState& group) {
  return group.master.size(0) == group.part_size ? group.master : own(group, group.master);
}

// Adds Σ gradient² in float64. In pieces, since a sum in another type makes a copy in that type first; on a GPU, where
// many pieces take long to queue, in rows that are summed in float32.
void add_square(const at::Tensor& grad, const at::Tensor& sum) {
  constexpr int64_t kPiece = int64_t{1} << 22, kRow = 4096;
  const auto norm = [](const at::Tensor& x, at::OptionalIntArrayRef dims, at::ScalarType type) {
    return at::linalg_vector_norm(x, 2, dims, false, type);
  };
  at::Tensor rest = grad;
  if (grad.is_cuda() && grad.scalar_type() == at::kFloat) {
    const int64_t rows = grad.numel() / kRow, whole = rows * kRow;
    const at::Tensor norms = norm(grad.narrow(0, 0, whole).view({rows, kRow}), at::IntArrayRef{1}, at::kFloat);
    sum.add_(norm(norms, {}, at::kDouble).square());
    rest = grad.narrow(0, whole, grad.numel() - whole);
  }
  for (const at::Tensor& piece : rest.split(kPiece)) sum.add_(norm(piece, {}, at::kDouble).square());
}

// Every rank's part into a whole flat tensor.
void gather_parts(const OptimGroupState& group, const at::Tensor& part, const at::Tensor& whole) {
  wait(group.data->all_gather(buffer_of(part), buffer_of(whole)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Optimizer>> Optimizer::create(ParamTable& params, const Recipe& recipe, DType dtype,
                                                             at::Device device, const OptimizerRanks& ranks) {
  std::vector<std::string> names;
  for (const auto& param : params.all()) names.push_back(param->name);
  PARVL_RETURN_IF_ERROR(check_patterns(recipe, names));
  const at::ScalarType value_type = to_scalar_type(dtype);
  const at::ScalarType master_type = dtype == DType::kFloat64 ? at::kDouble : at::kFloat;
  std::unique_ptr<Optimizer> optimizer(new Optimizer(recipe.optim, ranks));
  // One module a group, since each has its own mesh.
  std::map<std::tuple<Module, double, double, int64_t, int64_t, bool, bool>, size_t> index;
  optimizer->state_dtype_ = dtype == DType::kFloat64 ? dtype : DType::kFloat32;
  optimizer->masters_ = master_type != value_type;
  optimizer->device_ = device;
  optimizer->params_ = &params;
  bool any = false;
  for (Param* param : params.untied()) {
    param->trains = settings_of(recipe, names_of(params, *param), param->is_matrix()).trains;
    any = any || param->trains;
  }
  for (const auto& param : params.all()) {
    if (param->tied_to != nullptr) param->trains = param->tied_to->trains;
  }
  if (!any) return nothing_trains();
  for (Param* param : params.owned()) {
    if (!param->trains) {
      param->value = at::empty(param->part_shape(), at::TensorOptions().dtype(value_type).device(device));
      param->master = param->value;
      param->main_grad = at::Tensor();
      continue;
    }
    const ParamSettings settings = settings_of(recipe, names_of(params, *param), param->is_matrix());
    const double lr = settings.lr, weight_decay = settings.weight_decay;
    const bool counts = !ranks.counts || ranks.counts(*param);
    const bool on_two_stages = ranks.on_two_stages && ranks.on_two_stages(*param);
    auto [it, added] = index.emplace(
        std::tuple(param->module, lr, weight_decay, param->part.count, param->part.copies, counts, on_two_stages),
        optimizer->groups_.size());
    if (added) {
      optimizer->groups_.emplace_back();
      optimizer->groups_.back().lr = lr;
      optimizer->groups_.back().weight_decay = weight_decay;
      if (ranks.data) optimizer->groups_.back().data = ranks.data(param->module);
      optimizer->groups_.back().tensor = params.ranks(param->module);
      optimizer->groups_.back().part = param->part;
      optimizer->groups_.back().counts = counts;
    }
    optimizer->groups_[it->second].params.push_back(param);
  }
  for (OptimGroupState& group : optimizer->groups_)
    allocate_group(group, recipe.optim, ranks.zero1, master_type, value_type, device);
  params.link_tied();
  optimizer->sums_ = std::make_unique<GradientSums>(optimizer->groups_, device);
  return optimizer;
}

void Optimizer::shard() {
  for (OptimGroupState& group : groups_) {
    if (!group.master.is_same(group.grad)) continue;
    group.master = own(group, group.grad).clone();
    group.grad.zero_();
    for (Param* param : group.params) param->master = param->value;
  }
  params_->link_tied();
}

std::vector<StatePiece> Optimizer::state_pieces() const {
  std::vector<StatePiece> out;
  for (const OptimGroupState& group : groups_) {
    const bool counts = group.counts && (group.data == nullptr || ranks_.zero1 || group.data->rank() == 0);
    const int64_t end = group.part_begin + group.part_size;
    for (size_t i = 0; i < group.params.size(); ++i) {
      const int64_t offset = group.offsets[i], numel = group.params[i]->part_numel();
      const int64_t first = std::max(offset, group.part_begin), last = std::min(offset + numel, end);
      if (first >= last) continue;
      const auto add = [&](const char* state, const at::Tensor& flat) {
        if (!flat.defined()) return;
        const at::Tensor values = flat.narrow(0, first - group.part_begin, last - first);
        out.push_back({group.params[i], state, first - offset, values, counts});
      };
      add("moment1", group.moment1);
      add("moment2", group.moment2);
      if (masters_) add("master", own_master(group));
    }
  }
  return out;
}

void Optimizer::zero_grad() {
  for (OptimGroupState& group : groups_) group.grad.zero_();
}

void Optimizer::sum_over_tensor_group(OptimGroupState& group) {
  const CommSite site("optimizer.reduce_grads.tensor");
  const ShardPart& part = group.part;
  if (group.tensor.alone() || (part.count > 1 && part.copies == 1)) return;
  if (part.count == 1) return group.tensor.reduce(group.grad, ReduceOp::kSum);
  // Each part's copies lie on neighbours; with room for all parts one sum serves, whatever the groups.
  const at::Tensor all = at::zeros({part.count, group.grad.size(0)}, group.grad.options());
  all.select(0, part.index).copy_(group.grad);
  group.tensor.reduce(all, ReduceOp::kSum);
  group.grad.copy_(all.select(0, part.index));
}

void Optimizer::reduce_grads() {
  if (!ranks_.zero1) {
    for (OptimGroupState& group : groups_) sum_over_tensor_group(group);
    return sums_->finish();
  }
  const CommSite site("optimizer.reduce_grads");
  for (OptimGroupState& group : groups_) {
    sum_over_tensor_group(group);
    if (group.data == nullptr) continue;
    const at::Tensor part = at::empty({group.part_size}, group.grad.options());
    wait(group.data->reduce_scatter(buffer_of(group.grad), buffer_of(part)));
    own(group, group.grad).copy_(part);
  }
}

at::Tensor Optimizer::grad_norm() const {
  const CommSite site("optimizer.grad_norm");
  at::Tensor square = at::zeros({}, at::TensorOptions().dtype(at::kDouble).device(device_));
  for (const OptimGroupState& group : groups_) {
    const bool counted_elsewhere = group.data != nullptr && !ranks_.zero1 && group.data->rank() > 0;
    if (!group.counts || counted_elsewhere) continue;
    add_square(own(group, group.grad), square);
  }
  if (ranks_.sum) ranks_.sum(square);
  return square.sqrt();
}

void Optimizer::gather_grads() {
  const CommSite site("optimizer.gather_grads");
  for (OptimGroupState& group : groups_) {
    if (!ranks_.zero1 || group.data == nullptr) continue;
    gather_parts(group, own(group, group.grad).clone(), group.grad);
  }
}

void Optimizer::scale_grads(double factor) {
  for (OptimGroupState& group : groups_) own(group, group.grad).mul_(factor);
}

void Optimizer::step(double lr_factor) {
  at::NoGradGuard no_grad;
  for (OptimGroupState& group : groups_) {
    const double lr = group.lr * lr_factor;
    const at::Tensor master = own_master(group), grad = own(group, group.grad);
    if (recipe_.name == "adamw") {
      group.updates.add_(1);
      at::_fused_adamw_({master}, {grad}, {group.moment1}, {group.moment2}, {}, {group.updates}, lr,
                        recipe_.betas.first, recipe_.betas.second, group.weight_decay, recipe_.eps, /*amsgrad=*/false,
                        /*maximize=*/false);
      continue;
    }
    // Weight decay adds to the gradient, then momentum (Sutskever et al., 2013, in PyTorch's form).
    at::Tensor update = grad;
    if (group.weight_decay != 0) update = update.add(master, group.weight_decay);
    if (recipe_.momentum != 0) update = group.moment1.mul_(recipe_.momentum).add_(update);
    master.sub_(update, lr);
  }
  ++steps_done_;
  ++updates_done_;
  share_values();
}

// Each rank's part of the values to all.
void Optimizer::share_values() {
  const CommSite site("optimizer.share_values");
  for (OptimGroupState& group : groups_) {
    const bool one = group.value.is_same(group.master);
    if (!one) own(group, group.value).copy_(own_master(group));
    if (!ranks_.zero1 || group.data == nullptr) continue;
    gather_parts(group, own(group, group.value).clone(), group.value);
  }
}

void Optimizer::refresh_values() {
  at::NoGradGuard no_grad;
  for (OptimGroupState& group : groups_) {
    if (group.master.sizes() == group.value.sizes() && !group.value.is_same(group.master))
      group.value.copy_(group.master);
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
