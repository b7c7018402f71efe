#include "parvl/nn/param.h"

#include <ATen/CPUGeneratorImpl.h>

#include "parvl/base/check.h"

namespace parvl {

namespace {
constexpr int64_t kAlign = 64;  // values
}

const char* to_string(Module module) {
  switch (module) {
    case Module::kVisionEncoder:
      return "vision_encoder";
    case Module::kProjector:
      return "projector";
    case Module::kBackbone:
      return "llm_backbone";
  }
  return "?";
}

int64_t Param::numel() const {
  int64_t n = 1;
  for (int64_t size : shape) n *= size;
  return n;
}

Param* ParamTable::add(Module module, const std::string& name, std::vector<int64_t> shape, Init init, Shard shard) {
  auto param = std::make_unique<Param>();
  param->name = std::string(to_string(module)) + "." + name;
  param->shape = std::move(shape);
  param->module = module;
  param->init = init;
  param->shard = std::move(shard);
  const bool is_new = by_name_.emplace(param->name, param.get()).second;
  PARVL_CHECK(is_new, "a parameter name is used twice");
  params_.push_back(std::move(param));
  return params_.back().get();
}

Param* ParamTable::find(const std::string& name) const {
  const auto at = by_name_.find(name);
  return at == by_name_.end() ? nullptr : at->second;
}

std::vector<Param*> ParamTable::owned() const {
  std::vector<Param*> out;
  for (const auto& param : params_) {
    if (param->tied_to == nullptr) out.push_back(param.get());
  }
  return out;
}

void ParamTable::allocate(at::ScalarType dtype, at::Device device) {
  const auto padded = [](const Param& param) { return (param.numel() + kAlign - 1) / kAlign * kAlign; };
  int64_t total = 0;
  for (Param* param : owned()) total += padded(*param);
  const at::Tensor all = at::empty({total}, at::TensorOptions().dtype(dtype).device(device));
  int64_t offset = 0;
  for (const bool matrices : {true, false}) {
    for (Param* param : owned()) {
      if (param->is_matrix() != matrices) continue;
      param->value = all.narrow(0, offset, param->numel()).view(param->shape);
      param->master = param->value;
      offset += padded(*param);
    }
  }
  link_tied();
}

void ParamTable::initialise(uint64_t seed, double std) {
  for (Param* param : owned()) {
    if (param->init == Init::kOnes) {
      param->value.fill_(1);
    } else if (param->init == Init::kZeros) {
      param->value.zero_();
    } else {
      uint64_t hash = 14695981039346656037ull ^ seed;  // FNV-1a of the name, from the seed
      for (char c : param->name) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
      auto generator = at::make_generator<at::CPUGeneratorImpl>(hash);
      const at::Tensor random = at::empty(param->shape, at::kFloat).normal_(0, std, generator);
      param->value.copy_(random);
    }
    if (!param->master.is_same(param->value)) param->master.copy_(param->value);
  }
}

void ParamTable::link_tied() {
  for (const auto& param : params_) {
    if (param->tied_to == nullptr) continue;
    param->value = param->tied_to->value;
    param->master = param->tied_to->master;
    param->main_grad = param->tied_to->main_grad;
  }
}

at::ScalarType to_scalar_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return at::kFloat;
    case DType::kBFloat16:
      return at::kBFloat16;
    case DType::kFloat16:
      return at::kHalf;
    case DType::kFloat64:
      return at::kDouble;
  }
  return at::kFloat;
}

absl::StatusOr<DType> from_scalar_type(at::ScalarType type) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
    if (to_scalar_type(dtype) == type) return dtype;
  }
  return invalid("a tensor type that is no floating-point type of a model");
}

}  // namespace parvl
