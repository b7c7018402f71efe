#include "parvl/nn/param.h"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>

#include "parvl/base/check.h"
#include "parvl/nn/tensor_buffer.h"

namespace parvl {

namespace {
constexpr int64_t kAlign = 64;  // values

int64_t padded(const Param& param) { return (param.part_numel() + kAlign - 1) / kAlign * kAlign; }
}  // namespace

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

std::vector<int64_t> Param::part_shape() const {
  std::vector<int64_t> out = shape;
  if (part.count == 1) return out;
  const auto [begin, end] = part_range(part.index);
  out[static_cast<size_t>(shard.dim)] = (end - begin) * shard.blocks;
  return out;
}

int64_t Param::part_numel() const {
  int64_t n = 1;
  for (int64_t size : part_shape()) n *= size;
  return n;
}

std::pair<int64_t, int64_t> Param::part_range(int64_t index) const {
  const int64_t block = shape[static_cast<size_t>(std::max(0, shard.dim))] / shard.blocks;
  return {index * block / part.count, (index + 1) * block / part.count};
}

at::Tensor Param::part_of(const at::Tensor& whole, int64_t index) const {
  if (part.count == 1) return whole;
  const auto [begin, end] = part_range(index);
  if (shard.blocks == 1) return whole.narrow(shard.dim, begin, end - begin);
  const int64_t block = whole.size(shard.dim) / shard.blocks;
  std::vector<at::Tensor> pieces;
  for (int b = 0; b < shard.blocks; ++b) pieces.push_back(whole.narrow(shard.dim, b * block + begin, end - begin));
  return at::cat(pieces, shard.dim);
}

Param* ParamTable::add(Module module, const std::string& name, std::vector<int64_t> shape, Init init, Shard shard) {
  auto param = std::make_unique<Param>();
  param->name = std::string(to_string(module)) + "." + name;
  param->shape = std::move(shape);
  param->module = module;
  param->init = init;
  param->shard = shard;
  const bool is_new = by_name_.emplace(param->name, param.get()).second;
  PARVL_CHECK(is_new, "a parameter name is used twice");
  params_.push_back(std::move(param));
  return params_.back().get();
}

Param* ParamTable::find(const std::string& name) const {
  const auto at = by_name_.find(name);
  return at == by_name_.end() ? nullptr : at->second;
}

std::vector<Param*> ParamTable::untied() const {
  std::vector<Param*> out;
  for (const auto& param : params_) {
    if (param->tied_to == nullptr) out.push_back(param.get());
  }
  return out;
}

std::vector<Param*> ParamTable::owned() const {
  std::vector<Param*> out;
  for (Param* param : untied()) {
    if (param->here) out.push_back(param);
  }
  return out;
}

void ParamTable::keep(const std::function<bool(const Param&)>& holds) {
  for (const auto& param : params_) param->here = holds(*param);
}

absl::Status ParamTable::split(Module module, ProcessGroup* group) {
  TensorParallel& ranks = ranks_[static_cast<size_t>(module)];
  ranks = TensorParallel(group);
  const int64_t size = ranks.size();
  for (const auto& param : params_) {
    const Shard& shard = param->shard;
    if (param->module != module || !shard.cut()) continue;
    PARVL_CHECK(!param->value.defined(), "a parameter is cut that has its tensors already");
    const int64_t length = param->shape[static_cast<size_t>(shard.dim)] / shard.blocks;
    const int64_t units = shard.units > 0 ? shard.units : length;
    if (shard.copies && size > units && size % units == 0) {
      param->part = {ranks.rank() / (size / units), units, size / units};
      continue;
    }
    const bool fits = shard.units > 0 ? units % size == 0 : size <= units;
    if (!fits) {
      return invalid(to_string(module), ": tp = ", size, " does not divide the ", units, " parts that ", param->name,
                     " has (heads, or columns of an MLP)", shard.copies ? ", nor is it a multiple of them" : "");
    }
    param->part = {ranks.rank(), size, 1};
  }
  return absl::OkStatus();
}

at::Tensor ParamTable::whole(const Param& param, const at::Tensor& part) const {
  const TensorParallel& ranks = this->ranks(param.module);
  if (param.part.count == 1) return part;
  int64_t most = 0;
  std::vector<std::vector<int64_t>> shapes;
  Param other;
  other.shape = param.shape;
  other.shard = param.shard;
  for (int64_t index = 0; index < param.part.count; ++index) {
    other.part = {index, param.part.count, param.part.copies};
    shapes.push_back(other.part_shape());
    most = std::max(most, other.part_numel());
  }
  const at::Tensor filled = at::zeros({most}, part.options());
  filled.narrow(0, 0, part.numel()).copy_(part.reshape({-1}));
  const at::Tensor all = at::empty({ranks.size(), most}, part.options());
  wait(ranks.group()->all_gather(buffer_of(filled), buffer_of(all)));
  const at::Tensor out = at::empty(param.shape, part.options());
  const int64_t dim = param.shard.dim, blocks = param.shard.blocks;
  const int64_t block = param.shape[static_cast<size_t>(dim)] / blocks;
  for (int64_t index = 0; index < param.part.count; ++index) {
    const auto& shape = shapes[static_cast<size_t>(index)];
    const at::Tensor values = all.select(0, index * param.part.copies);
    int64_t numel = 1;
    for (int64_t size : shape) numel *= size;
    const at::Tensor piece = values.narrow(0, 0, numel).view(shape);
    const auto [begin, end] = param.part_range(index);
    for (int64_t b = 0; b < blocks; ++b) {
      out.narrow(dim, b * block + begin, end - begin).copy_(piece.narrow(dim, b * (end - begin), end - begin));
    }
  }
  return out;
}

int64_t ParamTable::allocated_numel() const {
  int64_t total = 0;
  for (const Param* param : owned()) total += padded(*param);
  return total;
}

void ParamTable::allocate(at::ScalarType dtype, at::Device device) {
  allocate_in(at::empty({allocated_numel()}, at::TensorOptions().dtype(dtype).device(device)));
}

void ParamTable::allocate_in(const at::Tensor& all) {
  int64_t offset = 0;
  for (const bool matrices : {true, false}) {
    for (Param* param : owned()) {
      if (param->is_matrix() != matrices) continue;
      param->value = all.narrow(0, offset, param->part_numel()).view(param->part_shape());
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
      param->value.copy_(param->own_part(random));
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
