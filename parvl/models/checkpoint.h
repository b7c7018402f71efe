// Hugging Face directories: weights in and out, one safetensors file or the sharded index, by mmap.
#pragma once

#include <string>

#include "parvl/models/model.h"

namespace parvl {

// Fills the model's allocated parameters (value, and master where that is its own tensor) from DIR, converting dtypes. A
// parameter that is missing, has another shape, or a tensor that no parameter takes, is an error naming it. Formats that can
// carry code (pytorch_model.bin, *.pt) are refused by name.
absl::Status load_weights(Model& model, const std::string& dir);

struct SaveOptions {
  DType dtype = DType::kFloat32;
  // Tokenizer, template, preprocessor and generation files are copied from here when they exist; "" for none.
  std::string copy_from;
  int64_t max_shard_bytes = int64_t{4} << 30;
};

// Writes a Hugging Face directory that transformers loads: config.json with the dtype, model.safetensors (or shards and their
// index). `dir` must exist and be empty; nothing is renamed here: the caller publishes the directory.
absl::Status save_weights(const Model& model, const std::string& dir, const SaveOptions& options);

}  // namespace parvl
