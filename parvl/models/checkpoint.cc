#include "parvl/models/checkpoint.h"

#include <unistd.h>

#include <filesystem>
#include <map>
#include <set>

#include "parvl/base/file.h"
#include "parvl/base/text.h"
#include "parvl/models/safetensors.h"

namespace parvl {
namespace {

namespace fs = std::filesystem;

bool exists(const std::string& path) { return ::access(path.c_str(), F_OK) == 0; }

// The files of a directory's weights in reading order.
absl::StatusOr<std::vector<std::string>> weight_files(const std::string& dir) {
  if (exists(dir + "/model.safetensors")) return std::vector<std::string>{"model.safetensors"};
  const std::string index = dir + "/model.safetensors.index.json";
  if (!exists(index)) {
    for (const char* name : {"pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth", "model.pt"}) {
      if (exists(dir + "/" + name)) {
        return invalid(dir, " holds its weights in ", name, ", a format that can carry code and is not loaded; convert it to safetensors");
      }
    }
    return invalid(dir, " has neither model.safetensors nor model.safetensors.index.json");
  }
  PARVL_ASSIGN_OR_RETURN(Json json, read_json_file(index));
  if (!json.is_object() || !json.contains("weight_map") || !json["weight_map"].is_object()) {
    return invalid(index, ": 'weight_map' is missing");
  }
  std::set<std::string> files;
  for (const auto& [tensor, file] : json["weight_map"].items()) {
    if (!file.is_string()) return invalid(index, ": the file of ", excerpt(tensor), " is not a string");
    const std::string name = file.get<std::string>();
    if (name.find('/') != std::string::npos || name.empty() || name[0] == '.') {
      return invalid(index, ": ", excerpt(name), " is not a plain file name");
    }
    files.insert(name);
  }
  return std::vector<std::string>(files.begin(), files.end());
}

at::Tensor map_tensor(const std::shared_ptr<MappedFile>& file, const TensorEntry& entry, at::ScalarType type) {
  void* data = const_cast<char*>(file->bytes().data()) + entry.offset;
  return at::from_blob(data, entry.shape, [file](void*) {}, at::TensorOptions().dtype(type));
}

struct Source {
  std::shared_ptr<MappedFile> file;
  TensorEntry entry;
};

absl::Status fill(Param& param, const Source& source, const std::string& where) {
  auto dtype = parse_safetensors_dtype(source.entry.dtype);
  if (!dtype.ok()) return with_context(dtype.status(), absl::StrCat(where, ": tensor ", excerpt(source.entry.name, 200)));
  const auto& shape = param.checkpoint_shape.empty() ? param.shape : param.checkpoint_shape;
  if (source.entry.shape != shape) {
    const auto text = [](const std::vector<int64_t>& sizes) {
      std::string out;
      for (int64_t size : sizes) absl::StrAppend(&out, out.empty() ? "" : "×", size);
      return out;
    };
    return invalid(where, ": tensor ", excerpt(source.entry.name, 200), " has shape ", text(source.entry.shape), ", the configuration says ",
                   text(shape));
  }
  const at::Tensor mapped = map_tensor(source.file, source.entry, to_scalar_type(*dtype)).view(param.shape);
  at::NoGradGuard no_grad;
  param.master.copy_(mapped);
  if (!param.master.is_same(param.value)) param.value.copy_(param.master);
  source.file->drop(source.entry.offset, source.entry.bytes);  // it is copied, so it need not stay in memory twice
  return absl::OkStatus();
}

// Tensors that checkpoints of these families may hold beside the parameters: buffers that are computed.
bool is_known_buffer(const std::string& name) {
  return name.size() >= 9 && name.compare(name.size() - 9, 9, ".inv_freq") == 0;
}

absl::Status save_file(const std::string& path, const std::vector<std::pair<std::string, const Param*>>& tensors, DType dtype) {
  std::vector<TensorEntry> entries;
  for (const auto& [name, param] : tensors) {
    const auto& shape = param->checkpoint_shape.empty() ? param->shape : param->checkpoint_shape;
    entries.push_back({name, safetensors_dtype(dtype), shape, 0, static_cast<uint64_t>(param->numel() * dtype_bytes(dtype))});
  }
  PARVL_ASSIGN_OR_RETURN(auto writer, FileWriter::create(path));
  const std::string header = make_safetensors_header(entries);
  PARVL_RETURN_IF_ERROR(writer->append(header.data(), header.size()));
  for (const auto& [name, param] : tensors) {
    const at::Tensor data = param->master.detach().to(at::kCPU, to_scalar_type(dtype)).contiguous();
    PARVL_RETURN_IF_ERROR(writer->append(data.data_ptr(), data.nbytes()));
  }
  return writer->finish();
}

absl::Status copy_companions(const std::string& from, const std::string& to) {
  for (const char* name : {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "preprocessor_config.json",
                           "generation_config.json", "special_tokens_map.json", "vocab.json", "merges.txt"}) {
    if (!exists(from + "/" + name)) continue;
    PARVL_ASSIGN_OR_RETURN(std::string content, read_file(from + "/" + name));
    PARVL_RETURN_IF_ERROR(write_file_atomically(to + "/" + name, content));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status load_weights(Model& model, const std::string& dir) {
  PARVL_ASSIGN_OR_RETURN(const std::vector<std::string> files, weight_files(dir));
  std::map<std::string, Source> sources;
  for (const std::string& name : files) {
    const std::string path = dir + "/" + name;
    PARVL_ASSIGN_OR_RETURN(auto mapped, MappedFile::open(path));
    PARVL_ASSIGN_OR_RETURN(auto entries, read_safetensors_header(mapped->bytes(), path));
    for (TensorEntry& entry : entries) {
      if (sources.count(entry.name)) return invalid(path, ": tensor ", excerpt(entry.name, 200), " also stands in another file of the directory");
      std::string key = entry.name;
      sources[key] = {mapped, std::move(entry)};
    }
  }
  std::set<std::string> used;
  for (const auto& param : model.params().all()) {
    std::string found;
    for (const std::string& name : model.checkpoint_names(*param)) {
      if (sources.count(name)) found = name;
    }
    if (!found.empty()) used.insert(found);
    if (param->tied_to != nullptr) continue;  // written by some tools although the configuration ties it
    if (found.empty()) {
      return invalid(dir, " lacks the tensor '", model.checkpoint_names(*param)[0], "' (", param->name, ")");
    }
    PARVL_RETURN_IF_ERROR(fill(*param, sources[found], dir));
  }
  for (const auto& [name, source] : sources) {
    if (!used.count(name) && !is_known_buffer(name)) {
      return invalid(dir, " holds a tensor ", excerpt(name, 200), " that a ", model.spec().model_type, " model has no place for");
    }
  }
  model.params().link_tied();
  return absl::OkStatus();
}

absl::Status save_weights(const Model& model, const std::string& dir, const SaveOptions& options) {
  std::vector<std::vector<std::pair<std::string, const Param*>>> shards(1);
  int64_t shard_bytes = 0, total_bytes = 0;
  for (const Param* param : model.params().owned()) {
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
  for (size_t i = 0; i < shards.size(); ++i) {
    char name[64] = "model.safetensors";
    if (shards.size() > 1) std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", i + 1, shards.size());
    PARVL_RETURN_IF_ERROR(save_file(dir + "/" + name, shards[i], options.dtype));
    for (const auto& [tensor, param] : shards[i]) weight_map[tensor] = name;
  }
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
