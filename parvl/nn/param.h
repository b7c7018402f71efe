// One parameter's truth. Checkpoints, optimizers, clipping, `verify` and the memory formulas all read this table.
#pragma once

#include <ATen/ATen.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "parvl/nn/tensor_parallel.h"
#include "parvl/plan/model_spec.h"

namespace parvl {

enum class Module { kVisionEncoder, kProjector, kBackbone };
const char* to_string(Module module);  // "vision_encoder", "projector", "llm_backbone": also the first part of a name

enum class Init { kNormal, kOnes, kZeros };

// How the ranks of a tensor-parallel group share a parameter. Without it every rank holds the whole tensor.
struct Shard {
  int dim = -1;    // of the global shape that is cut; -1: none
  int blocks = 1;  // equal parts of the dim that are each cut: 3 for rows that are queries, then keys, then values
  // What a cut may not go through, as so many equal parts of a block: heads. 0: any row may be the border, and parts
  // may differ by one (the vocabulary).
  int64_t units = 0;
  bool copies = false;  // with more ranks than units several have the same one (key and value heads)

  bool cut() const { return dim >= 0; }
};

// This rank's part of a parameter that is cut: part `index` of `count`, which `copies` ranks hold.
struct ShardPart {
  int64_t index = 0, count = 1, copies = 1;
};

struct Param {
  std::string name;            // global: "llm_backbone.layers.0.attn.q.weight"
  std::vector<int64_t> shape;  // global
  Module module = Module::kBackbone;
  Init init = Init::kNormal;
  Shard shard;
  ShardPart part;                         // the whole unless ParamTable::split cut it
  std::vector<int64_t> checkpoint_shape;  // where a checkpoint writes the same values in another shape; else empty
  Param* tied_to = nullptr;               // shares that parameter's tensors; saved and updated there

  bool here = true;     // this rank holds it: false where another stage of a pipeline does
  bool trains = false;  // an optimizer updates it, here or elsewhere

  // Of this rank's part, where it is here:
  at::Tensor value;      // what the forward reads, in the compute dtype, on the device
  at::Tensor master;     // what the optimizer updates: value itself, or its float32 original when value is 16-bit
  at::Tensor main_grad;  // accumulates over micro batches in master's dtype; undefined when frozen or only serving

  bool trainable() const { return main_grad.defined(); }
  bool is_matrix() const { return shape.size() >= 2; }  // weight decay applies to these
  int64_t numel() const;                                // global
  std::vector<int64_t> part_shape() const;
  int64_t part_numel() const;
  // Where part `index` lies in the cut dim of one block, as first and last + 1.
  std::pair<int64_t, int64_t> part_range(int64_t index) const;
  // Part `index` of a tensor of the global shape: a view where the part is one piece.
  at::Tensor part_of(const at::Tensor& whole, int64_t index) const;
  at::Tensor own_part(const at::Tensor& whole) const { return part_of(whole, part.index); }
};

// Owns the parameters in a fixed order (the model's own); pointers stay valid while it lives. Not thread-safe to
// change.
class ParamTable {
 public:
  Param* add(Module module, const std::string& name, std::vector<int64_t> shape, Init init = Init::kNormal,
             Shard shard = {});
  Param* find(const std::string& name) const;  // nullptr when there is none
  const std::vector<std::unique_ptr<Param>>& all() const { return params_; }
  // Those that own their tensors (not tied to another), in order: of all ranks, and on this one.
  std::vector<Param*> untied() const;
  std::vector<Param*> owned() const;
  // Leaves out what this rank does not hold. Before tensors are allocated.
  void keep(const std::function<bool(const Param&)>& holds);

  // Cuts a module's parameters over the ranks of `group` (null: leaves them whole), which the layers then compute with.
  // Before tensors are allocated. InvalidArgument naming the parameter and the numbers when these do not go together.
  absl::Status split(Module module, ProcessGroup* group);
  // The ranks that a module is cut over. The address stays while the table lives.
  const TensorParallel& ranks(Module module) const { return ranks_[static_cast<size_t>(module)]; }
  // TensorParallel::keep_whole_rows.
  void keep_whole_rows(Module module, bool whole) { ranks_[static_cast<size_t>(module)].keep_whole_rows(whole); }
  // A whole tensor of the parameter's global shape out of all ranks' parts, on all ranks of its module's group, which
  // all call it.
  at::Tensor whole(const Param& param, const at::Tensor& part) const;

  // Gives every owned parameter its part of one tensor of `dtype` on `device`, uninitialised. One, since the system
  // gives large pages only to large blocks, and weights are read faster from them. Matrices come before vectors, so
  // that those which multiply the same input lie side by side and can go through one product.
  void allocate(at::ScalarType dtype, at::Device device);
  // The same in memory of the caller's, a tensor [allocated_numel()] that begins at an address of the allocator's
  // alignment: also a second time, in another memory with the same values.
  void allocate_in(const at::Tensor& all);
  int64_t allocated_numel() const;
  // Random weights: a function of (seed, name) alone, whatever the device or the order.
  void initialise(uint64_t seed, double std);
  // Points tied parameters at their source's tensors. Call after any change of tensors.
  void link_tied();

 private:
  std::vector<std::unique_ptr<Param>> params_;
  std::unordered_map<std::string, Param*> by_name_;
  std::array<TensorParallel, 3> ranks_;  // by module
};

// While it lives, every rank has all rows of the module's forwards (TensorParallel::keep_whole_rows).
class WholeRows {
 public:
  WholeRows(ParamTable& params, Module module, bool whole = true) : params_(params), module_(module) {
    params_.keep_whole_rows(module_, whole);
  }
  ~WholeRows() { params_.keep_whole_rows(module_, false); }
  WholeRows(const WholeRows&) = delete;
  WholeRows& operator=(const WholeRows&) = delete;

 private:
  ParamTable& params_;
  const Module module_;
};

at::ScalarType to_scalar_type(DType dtype);
absl::StatusOr<DType> from_scalar_type(at::ScalarType type);

}  // namespace parvl
