// One parameter's truth. Checkpoints, optimizers, clipping, `verify` and the memory formulas all read this table.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "parvl/plan/model_spec.h"

namespace parvl {

enum class Module { kVisionEncoder, kProjector, kBackbone };
const char* to_string(Module module);  // "vision_encoder", "projector", "llm_backbone": also the first part of a name

enum class Init { kNormal, kOnes, kZeros };

// Which dim of the global shape a mesh axis may split. Empty axis: every rank holds the whole tensor.
struct Shard {
  std::string axis;
  int dim = 0;
  int blocks = 1;  // equal parts of the dim that are each cut: 3 for rows that are queries, then keys, then values
};

struct Param {
  std::string name;            // global: "llm_backbone.layers.0.attn.q.weight"
  std::vector<int64_t> shape;  // global
  Module module = Module::kBackbone;
  Init init = Init::kNormal;
  Shard shard;
  std::vector<int64_t> checkpoint_shape;  // where a checkpoint writes the same values in another shape; else empty
  Param* tied_to = nullptr;               // shares that parameter's tensors; saved and updated there

  at::Tensor value;      // what the forward reads, in the compute dtype, on the device
  at::Tensor master;     // what the optimizer updates: value itself, or its float32 original when value is 16-bit
  at::Tensor main_grad;  // accumulates over micro batches in master's dtype; undefined when frozen or only serving

  bool trainable() const { return main_grad.defined(); }
  bool is_matrix() const { return shape.size() >= 2; }  // weight decay applies to these
  int64_t numel() const;
};

// Owns the parameters in a fixed order (the model's own); pointers stay valid while it lives. Not thread-safe to
// change.
class ParamTable {
 public:
  Param* add(Module module, const std::string& name, std::vector<int64_t> shape, Init init = Init::kNormal,
             Shard shard = {});
  Param* find(const std::string& name) const;  // nullptr when there is none
  const std::vector<std::unique_ptr<Param>>& all() const { return params_; }
  // Those that own their tensors (not tied to another), in order.
  std::vector<Param*> owned() const;

  // Gives every owned parameter its part of one tensor of `dtype` on `device`, uninitialised. One, since the system
  // gives large pages only to large blocks, and weights are read faster from them. Matrices come before vectors, so
  // that those which multiply the same input lie side by side and can go through one product.
  void allocate(at::ScalarType dtype, at::Device device);
  // Random weights: a function of (seed, name) alone, whatever the device or the order.
  void initialise(uint64_t seed, double std);
  // Points tied parameters at their source's tensors. Call after any change of tensors.
  void link_tied();

 private:
  std::vector<std::unique_ptr<Param>> params_;
  std::unordered_map<std::string, Param*> by_name_;
};

at::ScalarType to_scalar_type(DType dtype);
absl::StatusOr<DType> from_scalar_type(at::ScalarType type);

}  // namespace parvl
