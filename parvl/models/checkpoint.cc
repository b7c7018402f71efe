#include "parvl/models/checkpoint.h"

#include <unistd.h>

#include <optional>
#include <set>

#include "parvl/base/file.h"
#include "parvl/base/text.h"
#include "parvl/nn/device.h"
#include "parvl/nn/pinned_ring.h"

namespace parvl {
namespace {

bool exists(const std::string& path) { return ::access(path.c_str(), F_OK) == 0; }

at::Tensor map_tensor(const std::shared_ptr<MappedFile>& file, const TensorEntry& entry, at::ScalarType type) {
  void* data = const_cast<char*>(file->bytes().data()) + entry.offset;
  return at::from_blob(
      data, entry.shape, [file](void*) {}, at::TensorOptions().dtype(type));
}

std::string shape_text(const std::vector<int64_t>& sizes) {
  if (sizes.empty()) return "(a single number)";
  std::string out;
  for (int64_t size : sizes) absl::StrAppend(&out, out.empty() ? "" : "×", size);
  return out;
}

absl::Status check_fits(const Param& param, const TensorEntry& entry) {
  auto dtype = parse_safetensors_dtype(entry.dtype);
  if (!dtype.ok()) return with_context(dtype.status(), absl::StrCat("tensor ", excerpt(entry.name, 200)));
  const auto& shape = param.checkpoint_shape.empty() ? param.shape : param.checkpoint_shape;
  if (entry.shape == shape) return absl::OkStatus();
  return invalid("tensor ", excerpt(entry.name, 200), " has shape ", shape_text(entry.shape),
                 ", the configuration says ", shape_text(shape));
}

void fill(Param& param, const StoredTensor& stored, std::optional<PinnedRing>& ring) {
  const at::ScalarType type = to_scalar_type(*parse_safetensors_dtype(stored.entry.dtype));
  const at::Tensor mapped = map_tensor(stored.file, stored.entry, type).view(param.shape);
  at::NoGradGuard no_grad;
  const at::Tensor own = param.own_part(mapped);
  if (ring.has_value()) {
    ring->copy(own.contiguous(), param.master);
  } else {
    param.master.copy_(own);
  }
  if (!param.master.is_same(param.value)) param.value.copy_(param.master);
  stored.file->drop(stored.entry.offset, stored.entry.bytes);  // it is read, so it need not stay in memory twice
}

// Tensors that checkpoints of these families may hold beside the parameters: buffers that are computed.
bool is_known_buffer(const std::string& name) {
  return name.size() >= 9 && name.compare(name.size() - 9, 9, ".inv_freq") == 0;
}

using NamedParams = std::vector<std::pair<std::string, const Param*>>;

absl::StatusOr<std::unique_ptr<TensorFileWriter>> begin_file(const std::string& path, const NamedParams& tensors,
                                                             DType dtype) {
  std::vector<TensorEntry> entries;
  for (const auto& [name, param] : tensors) {
    const auto& shape = param->checkpoint_shape.empty() ? param->shape : param->checkpoint_shape;
    entries.push_back(
        {name, safetensors_dtype(dtype), shape, 0, static_cast<uint64_t>(param->numel() * dtype_bytes(dtype))});
  }
  return TensorFileWriter::create(path, std::move(entries));
}

absl::Status save_file(const std::string& dir, const std::string& file, const NamedParams& tensors,
                       const SaveOptions& options) {
  absl::StatusOr<std::unique_ptr<TensorFileWriter>> writer = nullptr;
  if (options.write) writer = begin_file(dir + "/" + file, tensors, options.dtype);
  absl::Status status = writer.status();
  for (const auto& [name, param] : tensors) {
    const at::Tensor whole = options.whole(*param).detach();
    if (!options.write || !status.ok()) continue;
    status = catch_exceptions("cannot write " + name, [&] {
      const at::Tensor data = whole.to(at::kCPU, to_scalar_type(options.dtype)).contiguous();
      return (*writer)->append(data.data_ptr(), data.nbytes());
    });
  }
  if (!options.write || !status.ok()) return status;
  PARVL_ASSIGN_OR_RETURN(TensorFileHashes hashes, (*writer)->finish());
  if (options.hashes != nullptr) (*options.hashes)[file] = std::move(hashes);
  return absl::OkStatus();
}

absl::Status copy_companions(const std::string& from, const std::string& to) {
  for (const char* name : kCompanionFiles) {
    if (!exists(from + "/" + name)) continue;
    PARVL_ASSIGN_OR_RETURN(std::string content, read_file(from + "/" + name));
    PARVL_RETURN_IF_ERROR(write_file_atomically(to + "/" + name, content));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<StoredTensor>> match_weights(const Model& model, const std::string& dir) {
  PARVL_ASSIGN_OR_RETURN(auto stored, open_weight_files(dir));
  std::set<std::string> used;
  std::vector<StoredTensor> out;
  for (const auto& param : model.params().all()) {
    std::string found;
    for (const std::string& name : model.checkpoint_names(*param)) {
      if (stored.count(name)) found = name;
    }
    if (!found.empty()) used.insert(found);
    if (param->tied_to != nullptr) {  // written by some tools although the configuration ties it
      out.emplace_back();
      continue;
    }
    if (found.empty()) {
      return invalid(dir, " lacks the tensor '", model.checkpoint_names(*param)[0], "' (", param->name, ")");
    }
    PARVL_RETURN_IF_ERROR(with_context(check_fits(*param, stored[found].entry), dir));
    out.push_back(stored[found]);
  }
  for (const auto& [name, tensor] : stored) {
    if (used.count(name) || is_known_buffer(name)) continue;
    return invalid(dir, " holds a tensor ", excerpt(name, 200), " that a ", model.spec().model_type,
                   " model has no place for");
  }
  return out;
}

absl::Status load_weights(Model& model, const std::string& dir, const std::function<void(int64_t, int64_t)>& progress) {
  PARVL_ASSIGN_OR_RETURN(const std::vector<StoredTensor> stored, match_weights(model, dir));
  const auto& params = model.params().all();
  const at::Device device = model.params().owned().front()->master.device();
  std::optional<PinnedRing> ring;
  if (device.is_cuda()) ring.emplace(device);
  uint64_t total = 0, done = 0;
  for (size_t i = 0; i < params.size(); ++i) total += params[i]->here ? stored[i].entry.bytes : 0;
  for (size_t i = 0; i < params.size(); ++i) {
    if (params[i]->tied_to != nullptr || !params[i]->here) continue;
    fill(*params[i], stored[i], ring);
    done += stored[i].entry.bytes;
    if (progress) progress(static_cast<int64_t>(done), static_cast<int64_t>(total));
  }
  synchronize(device);
  model.params().link_tied();
  return absl::OkStatus();
}

absl::Status save_weights(const Model& model, const std::string& dir, const SaveOptions& options) {
  std::vector<NamedParams> shards(1);
  int64_t shard_bytes = 0, total_bytes = 0;
  for (const Param* param : model.params().untied()) {
    const int64_t bytes = param->numel() * dtype_bytes(options.dtype);
    if (shard_bytes > 0 && shard_bytes + bytes > options.max_shard_bytes) {
      shards.emplace_back();
      shard_bytes = 0;
    }
    shards.back().emplace_back(model.checkpoint_names(*param)[0], param);
    shard_bytes += bytes;
    total_bytes += bytes;
  }
  Json weight_map = Json::object();
  absl::Status status;
  for (size_t i = 0; i < shards.size(); ++i) {
    char name[64] = "model.safetensors";
    if (shards.size() > 1) std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", i + 1, shards.size());
    status.Update(save_file(dir, name, shards[i], options));
    for (const auto& [tensor, param] : shards[i]) weight_map[tensor] = name;
  }
  if (!options.write || !status.ok()) return status;
  if (shards.size() > 1) {
    const Json index = {{"metadata", {{"total_size", total_bytes}}}, {"weight_map", weight_map}};
    PARVL_RETURN_IF_ERROR(write_file_atomically(dir + "/model.safetensors.index.json", index.dump(2) + "\n"));
  }
  Json config = model.spec().config;
  const char* dtype_key = config.contains("torch_dtype") ? "torch_dtype" : "dtype";
  config[dtype_key] = to_string(options.dtype);
  if (config.contains("text_config") && config["text_config"].is_object()) {
    for (const char* key : {"torch_dtype", "dtype"}) {
      if (config["text_config"].contains(key)) config["text_config"][key] = to_string(options.dtype);
    }
  }
  PARVL_RETURN_IF_ERROR(write_file_atomically(dir + "/config.json", config.dump(2) + "\n"));
  if (!options.copy_from.empty()) PARVL_RETURN_IF_ERROR(copy_companions(options.copy_from, dir));
  return absl::OkStatus();
}

}  // namespace parvl
