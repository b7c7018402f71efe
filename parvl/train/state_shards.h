// The optimizer's state in a checkpoint: trainer/state-R-of-W.safetensors has the values that rank R of W keeps (of
// those that several keep, the first writes them), and state-R-of-W.json beside it says which values of which tensors
// these are, with their hashes. Nothing is gathered: each rank writes and reads what it keeps, in any layout.
#pragma once

#include <string>
#include <vector>

#include "parvl/train/checkpoint_manifest.h"
#include "parvl/train/optimizer.h"
#include "parvl/train/tensor_slice.h"

namespace parvl {

// What one rank wrote, by its state-R-of-W.json. "NAME.moment1" and so on, NAME a parameter's.
struct StateShard {
  std::string file;                 // its tensors, inside the checkpoint
  std::string dtype;                // of all of them, as safetensors spells it
  TensorFileHashes hashes;          // no tensors: there is no file
  std::vector<int64_t> numels;      // of the whole tensors, in the file's order
  std::vector<TensorSlice> slices;  // which of these values are here
};

// The name of a rank's files inside the checkpoint, without .safetensors and .json.
std::string state_file(int64_t rank, int64_t world);
// This rank's files into DIR/trainer. Each rank for itself.
absl::Status write_state(const std::string& dir, const Optimizer& optimizer, int64_t rank, int64_t world);

// What all ranks wrote. Errors name the file that is missing or damaged.
absl::StatusOr<std::vector<StateShard>> read_state_shards(const std::string& dir, const CheckpointManifest& manifest);

// Fills what this rank's optimizer keeps, after `shard`; reads no other values. InvalidArgument naming a tensor that is
// not there in full, or is of another type.
absl::Status load_state(const std::string& dir, const std::vector<StateShard>& shards, const Optimizer& optimizer);

}  // namespace parvl
