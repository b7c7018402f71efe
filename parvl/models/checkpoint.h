// Hugging Face directories: weights in and out, one safetensors file or the sharded index, by mmap.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "parvl/models/model.h"
#include "parvl/models/tensor_file.h"
#include "parvl/models/weight_files.h"

namespace parvl {

// Where each parameter of `model.params().all()`, in that order, is stored in DIR (a tied one: an entry without a
// file), by the files' headers alone: nothing has to be allocated. A parameter that is missing, has another shape or an
// unknown type, or a tensor that no parameter takes, is an error naming it.
absl::StatusOr<std::vector<StoredTensor>> match_weights(const Model& model, const std::string& dir);

// Fills the model's allocated parameters, those of this rank (value, and master where that is its own tensor) from DIR,
// converting dtypes; on return they are there. `progress` hears how many of how many bytes of the files are read, after
// each tensor.
absl::Status load_weights(Model& model, const std::string& dir,
                          const std::function<void(int64_t done, int64_t total)>& progress = {});

// Files of a model directory beside config.json and the weights: what the tokenizer, the chat template, the
// preprocessor and generation are read from, in any of their layouts.
inline constexpr const char* kCompanionFiles[] = {"tokenizer.json",
                                                  "tokenizer_config.json",
                                                  "chat_template.jinja",
                                                  "chat_template.json",
                                                  "preprocessor_config.json",
                                                  "processor_config.json",
                                                  "generation_config.json",
                                                  "special_tokens_map.json",
                                                  "added_tokens.json",
                                                  "vocab.json",
                                                  "merges.txt"};

struct SaveOptions {
  DType dtype = DType::kFloat32;
  // Tokenizer, template, preprocessor and generation files are copied from here when they exist; "" for none.
  std::string copy_from;
  int64_t max_shard_bytes = int64_t{4} << 30;
  // Gives the whole of a parameter where this rank may hold a part of it or nothing: of one at a time. All ranks call
  // it, and so save_weights; one of them writes.
  std::function<at::Tensor(const Param&)> whole = [](const Param& param) { return param.master; };
  bool write = true;
  // Filled with the hashes of the weight files that were written, by their names in DIR; null: not asked for.
  std::map<std::string, TensorFileHashes>* hashes = nullptr;
};

// Writes a Hugging Face directory that transformers loads: config.json with the dtype, model.safetensors (or shards and
// their index). `dir` must exist and be empty; nothing is renamed here: the caller publishes the directory.
// After an error it has still asked `whole` for every parameter, so that no rank waits.
absl::Status save_weights(const Model& model, const std::string& dir, const SaveOptions& options);

}  // namespace parvl
