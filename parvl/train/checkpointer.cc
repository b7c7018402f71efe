#include "parvl/train/checkpointer.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "parvl/base/file.h"
#include "parvl/models/checkpoint.h"
#include "parvl/models/safetensors.h"

namespace parvl {
namespace {

namespace fs = std::filesystem;
constexpr char kManifest[] = "trainer/manifest.json";
constexpr char kState[] = "trainer/state.json";
constexpr char kTensors[] = "trainer/optimizer.safetensors";

// Name and flat-tensor slice of everything that the optimizer carries for each parameter.
std::vector<std::pair<std::string, at::Tensor>> optimizer_tensors(const Optimizer& optimizer, bool with_master) {
  std::vector<std::pair<std::string, at::Tensor>> out;
  for (const OptimGroupState& group : optimizer.groups()) {
    for (size_t i = 0; i < group.params.size(); ++i) {
      const Param& param = *group.params[i];
      const auto add = [&](const char* what, const at::Tensor& flat) {
        if (flat.defined()) out.emplace_back(param.name + "." + what, flat.narrow(0, group.offsets[i], param.numel()).view(param.shape));
      };
      add("moment1", group.moment1);
      add("moment2", group.moment2);
      if (with_master) add("master", group.master);
    }
  }
  return out;
}

// 16-bit checkpoints round the masters, so these are kept too.
bool needs_master(const Optimizer& optimizer) {
  return !optimizer.groups().front().value.is_same(optimizer.groups().front().master);
}

absl::Status save_optimizer(const std::string& path, const Optimizer& optimizer) {
  const auto tensors = optimizer_tensors(optimizer, needs_master(optimizer));
  std::vector<TensorEntry> entries;
  for (const auto& [name, tensor] : tensors) {
    const char* dtype = tensor.scalar_type() == at::kDouble ? "F64" : "F32";
    entries.push_back({name, dtype, tensor.sizes().vec(), 0, static_cast<uint64_t>(tensor.nbytes())});
  }
  PARVL_ASSIGN_OR_RETURN(auto writer, FileWriter::create(path));
  const std::string header = make_safetensors_header(entries);
  PARVL_RETURN_IF_ERROR(writer->append(header.data(), header.size()));
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor data = tensor.to(at::kCPU).contiguous();
    PARVL_RETURN_IF_ERROR(writer->append(data.data_ptr(), data.nbytes()));
  }
  return writer->finish();
}

absl::Status load_optimizer(const std::string& path, Optimizer& optimizer) {
  PARVL_ASSIGN_OR_RETURN(auto mapped, MappedFile::open(path));
  PARVL_ASSIGN_OR_RETURN(const auto entries, read_safetensors_header(mapped->bytes(), path));
  for (const auto& [name, tensor] : optimizer_tensors(optimizer, needs_master(optimizer))) {
    auto entry = std::find_if(entries.begin(), entries.end(), [&, &name = name](const TensorEntry& e) { return e.name == name; });
    if (entry == entries.end()) return invalid(path, " lacks '", name, "'; the checkpoint is of another optimizer or freeze plan");
    if (entry->shape != tensor.sizes().vec() || entry->bytes != tensor.nbytes()) return invalid(path, ": '", name, "' has another shape or type");
    at::Tensor target = tensor;
    target.copy_(at::from_blob(const_cast<char*>(mapped->bytes().data()) + entry->offset, tensor.sizes(),
                               at::TensorOptions().dtype(tensor.scalar_type())));
  }
  return absl::OkStatus();
}

std::vector<std::string> files_below(const std::string& dir) {
  std::vector<std::string> out;
  for (const auto& entry : fs::recursive_directory_iterator(dir)) {
    if (entry.is_regular_file()) out.push_back(fs::relative(entry.path(), dir).string());
  }
  std::sort(out.begin(), out.end());
  return out;
}

absl::StatusOr<std::string> hash_file(const std::string& path) {
  PARVL_ASSIGN_OR_RETURN(auto mapped, MappedFile::open(path));
  return sha256_hex(mapped->bytes());
}

absl::Status write_all(const std::string& dir, DType dtype, const CheckpointContents& contents) {
  fs::create_directories(dir + "/trainer");
  PARVL_RETURN_IF_ERROR(save_weights(*contents.model, dir, {.dtype = dtype, .copy_from = contents.copy_from}));
  PARVL_RETURN_IF_ERROR(save_optimizer(dir + "/" + kTensors, *contents.optimizer));
  const Json state = {{"format", 1}, {"step", contents.step}, {"identity", contents.identity}};
  PARVL_RETURN_IF_ERROR(write_file_atomically(dir + "/" + kState, state.dump(2) + "\n"));
  Json manifest = Json::object();
  for (const std::string& file : files_below(dir)) {
    PARVL_ASSIGN_OR_RETURN(manifest[file], hash_file(dir + "/" + file));
  }
  PARVL_RETURN_IF_ERROR(write_file_atomically(dir + "/" + kManifest, manifest.dump(2) + "\n"));
  return sync_directory(dir);
}

absl::Status check_hashes(const std::string& dir) {
  PARVL_ASSIGN_OR_RETURN(const Json manifest, read_json_file(dir + "/" + kManifest));
  if (!manifest.is_object() || manifest.empty()) return invalid(dir, "/", kManifest, " is damaged");
  for (const auto& [file, hash] : manifest.items()) {
    if (file.find("..") != std::string::npos) return invalid(dir, "/", kManifest, " names a file outside the checkpoint");
    PARVL_ASSIGN_OR_RETURN(const std::string found, hash_file(dir + "/" + file));
    if (!hash.is_string() || found != hash.get<std::string>()) {
      return invalid("checkpoint ", dir, " is damaged: ", file, " does not have the hash it was written with");
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::string> save_checkpoint(const std::string& out, DType dtype, const CheckpointContents& contents) {
  const std::string final_dir = out + "/step-" + std::to_string(contents.step);
  const std::string temporary = out + "/.step-" + std::to_string(contents.step) + ".tmp";
  absl::Status status = catch_exceptions("cannot save the checkpoint " + final_dir, [&]() -> absl::Status {
    fs::remove_all(temporary);
    return write_all(temporary, dtype, contents);
  });
  std::error_code error;
  if (status.ok()) {
    fs::remove_all(final_dir, error);  // of a run that was started over
    fs::rename(temporary, final_dir, error);
    if (error) status = failed("cannot rename ", temporary, " to ", final_dir, ": ", error.message());
  }
  if (status.ok()) status = sync_directory(out);
  if (!status.ok()) {
    fs::remove_all(temporary, error);
    return status;
  }
  return final_dir;
}

std::vector<int64_t> list_checkpoints(const std::string& out) {
  std::vector<int64_t> steps;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(out, error)) {
    const std::string name = entry.path().filename().string();
    if (name.rfind("step-", 0) != 0 || name.size() > 20) continue;
    if (name.find_first_not_of("0123456789", 5) != std::string::npos || name.size() == 5) continue;
    steps.push_back(std::stoll(name.substr(5)));
  }
  std::sort(steps.rbegin(), steps.rend());
  return steps;
}

absl::StatusOr<int64_t> load_checkpoint(const std::string& dir, const ResumeTarget& target) {
  PARVL_RETURN_IF_ERROR(check_hashes(dir));
  PARVL_ASSIGN_OR_RETURN(const Json state, read_json_file(dir + "/" + kState));
  PARVL_ASSIGN_OR_RETURN(const std::string identity, json_value<std::string>(state, "identity", ""));
  if (identity != target.identity) {
    return invalid("checkpoint ", dir, " belongs to another run: it was made with ", identity, ", this one has ", target.identity,
                   "; use another train.out, or train.resume=never");
  }
  PARVL_ASSIGN_OR_RETURN(const int64_t step, json_value<int64_t>(state, "step", -1));
  if (step < 0) return invalid(dir, "/", kState, " has no step");
  PARVL_RETURN_IF_ERROR(load_weights(*target.model, dir));
  PARVL_RETURN_IF_ERROR(load_optimizer(dir + "/" + kTensors, *target.optimizer));
  target.optimizer->refresh_values();
  target.optimizer->set_steps_done(step);
  return step;
}

}  // namespace parvl
