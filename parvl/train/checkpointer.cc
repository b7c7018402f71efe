#include "parvl/train/checkpointer.h"

#include <absl/strings/match.h>
#include <absl/strings/str_join.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>

#include "parvl/base/file.h"
#include "parvl/models/checkpoint.h"
#include "parvl/models/safetensors.h"

namespace parvl {
namespace {

namespace fs = std::filesystem;
constexpr char kManifest[] = "trainer/manifest.json";
constexpr char kState[] = "trainer/state.json";
constexpr char kTensors[] = "trainer/optimizer.safetensors";
constexpr int64_t kFormat = 1;

// A tensor that the optimizer carries for a parameter: this rank's part, a slice of a flat tensor; undefined where the
// parameter is not here.
struct StateTensor {
  std::string name;
  const Param* param = nullptr;
  at::Tensor part;
};

std::vector<StateTensor> optimizer_tensors(const ParamTable& params, const Optimizer& optimizer) {
  std::map<std::string, at::Tensor> parts;
  for (const OptimGroupState& group : optimizer.groups()) {
    for (size_t i = 0; i < group.params.size(); ++i) {
      const Param& param = *group.params[i];
      const std::pair<const char*, at::Tensor> states[] = {
          {".moment1", group.moment1}, {".moment2", group.moment2}, {".master", group.master}};
      for (const auto& [what, flat] : states) {
        if (!flat.defined()) continue;
        parts[param.name + what] = flat.narrow(0, group.offsets[i], param.part_numel()).view(param.part_shape());
      }
    }
  }
  std::vector<StateTensor> out;
  for (const Param* param : params.untied()) {
    for (const std::string& what : optimizer.states()) {
      const std::string name = param->name + "." + what;
      if (param->trains) out.push_back({name, param, parts[name]});
    }
  }
  return out;
}

absl::StatusOr<std::unique_ptr<FileWriter>> begin_file(const std::string& path, const std::vector<StateTensor>& tensors,
                                                       DType dtype) {
  std::vector<TensorEntry> entries;
  for (const StateTensor& tensor : tensors) {
    const auto bytes = static_cast<uint64_t>(tensor.param->numel() * dtype_bytes(dtype));
    entries.push_back({tensor.name, safetensors_dtype(dtype), tensor.param->shape, 0, bytes});
  }
  PARVL_ASSIGN_OR_RETURN(auto writer, FileWriter::create(path));
  const std::string header = make_safetensors_header(entries);
  PARVL_RETURN_IF_ERROR(writer->append(header.data(), header.size()));
  return writer;
}

// As save_weights: every rank gives its parts, also after an error.
absl::Status save_optimizer(const std::string& path, const CheckpointContents& contents, bool write) {
  const ParamTable& params = contents.model->params();
  const DType dtype = contents.optimizer->state_dtype();
  const auto tensors = optimizer_tensors(params, *contents.optimizer);
  absl::StatusOr<std::unique_ptr<FileWriter>> writer = nullptr;
  if (write) writer = begin_file(path, tensors, dtype);
  absl::Status status = writer.status();
  for (const StateTensor& tensor : tensors) {
    const at::Tensor whole =
        contents.ranks->whole(params, *tensor.param, tensor.part,
                              at::TensorOptions().dtype(to_scalar_type(dtype)).device(contents.optimizer->device()));
    if (!write || !status.ok()) continue;
    status = catch_exceptions("cannot write " + tensor.name, [&] {
      const at::Tensor data = whole.to(at::kCPU).contiguous();
      return (*writer)->append(data.data_ptr(), data.nbytes());
    });
  }
  return write && status.ok() ? (*writer)->finish() : status;
}

absl::Status load_optimizer(const std::string& path, const ParamTable& params, Optimizer& optimizer) {
  const DType dtype = optimizer.state_dtype();
  PARVL_ASSIGN_OR_RETURN(auto mapped, MappedFile::open(path));
  PARVL_ASSIGN_OR_RETURN(const auto entries, read_safetensors_header(mapped->bytes(), path));
  std::map<std::string, const TensorEntry*> by_name;
  for (const TensorEntry& entry : entries) by_name[entry.name] = &entry;
  for (const StateTensor& tensor : optimizer_tensors(params, optimizer)) {
    const auto found = by_name.find(tensor.name);
    if (found == by_name.end())
      return invalid(path, " lacks '", tensor.name, "'; the checkpoint is of another optimizer");
    const TensorEntry& entry = *found->second;
    if (entry.shape != tensor.param->shape || entry.dtype != safetensors_dtype(dtype)) {
      return invalid(path, ": '", tensor.name, "' has another shape or type than this run's");
    }
    if (!tensor.part.defined()) continue;
    const at::Tensor whole = at::from_blob(const_cast<char*>(mapped->bytes().data()) + entry.offset, entry.shape,
                                           at::TensorOptions().dtype(tensor.part.scalar_type()));
    at::Tensor part = tensor.part;
    part.copy_(tensor.param->own_part(whole));
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

absl::Status write_manifest(const std::string& dir) {
  Json files = Json::object();
  for (const std::string& file : files_below(dir)) {
    PARVL_ASSIGN_OR_RETURN(files[file], sha256_file(dir + "/" + file));
  }
  // Its own hash, so that damage to the list is not taken for damage to a file of the list.
  const Json manifest = {{"files", files}, {"sha256", sha256_hex(files.dump())}};
  return write_file_atomically(dir + "/" + kManifest, manifest.dump(2) + "\n");
}

absl::Status write_all(const std::string& dir, DType dtype, const CheckpointContents& contents) {
  absl::Status status;
  if (contents.ranks->is_first()) {
    status = catch_exceptions("cannot make the folder", [&] {
      fs::remove_all(dir);
      fs::create_directories(dir + "/trainer");
      return absl::OkStatus();
    });
  }
  const auto writes = [&] { return contents.ranks->is_first() && status.ok(); };
  const auto whole = [&](const Param& param) {
    const at::ScalarType type = to_scalar_type(param.trains ? contents.optimizer->state_dtype() : dtype);
    return contents.ranks->whole(contents.model->params(), param, param.master,
                                 at::TensorOptions().dtype(type).device(contents.optimizer->device()));
  };
  status.Update(save_weights(*contents.model, dir,
                             {.dtype = dtype, .copy_from = contents.copy_from, .whole = whole, .write = writes()}));
  status.Update(save_optimizer(dir + "/" + kTensors, contents, writes()));
  if (!writes()) return status;
  const Json state = {{"format", kFormat},
                      {"step", contents.optimizer->steps_done()},
                      {"updates", contents.optimizer->updates_done()},
                      {"run", contents.run},
                      {"identity", contents.identity}};
  PARVL_RETURN_IF_ERROR(write_file_atomically(dir + "/" + kState, state.dump(2) + "\n"));
  PARVL_RETURN_IF_ERROR(write_manifest(dir));
  PARVL_RETURN_IF_ERROR(sync_directory(dir + "/trainer"));
  return sync_directory(dir);
}

constexpr char kAside[] = ".replaced";

// Puts `temporary` where `final_dir` is; a directory that stands there (of a run that was started over) changes places
// with it in one step, or, on a file system that cannot do that, is put aside first, from where OutputLock::take brings
// it back.
absl::Status publish(const std::string& temporary, const std::string& final_dir) {
  if (::rename(temporary.c_str(), final_dir.c_str()) == 0) return absl::OkStatus();
  if (errno == ENOTEMPTY || errno == EEXIST) {
    if (::renameat2(AT_FDCWD, temporary.c_str(), AT_FDCWD, final_dir.c_str(), RENAME_EXCHANGE) == 0) {
      return absl::OkStatus();
    }
    const std::string aside = temporary + kAside;
    if (::rename(final_dir.c_str(), aside.c_str()) == 0) {
      if (::rename(temporary.c_str(), final_dir.c_str()) == 0) {
        std::error_code ignored;  // what is left goes with the next clean-up
        fs::remove_all(aside, ignored);
        return absl::OkStatus();
      }
      const int error = errno;
      ::rename(aside.c_str(), final_dir.c_str());
      errno = error;
    }
  }
  return failed("cannot rename ", temporary, " to ", final_dir, ": ", std::strerror(errno));
}

// What a process that died while saving left in OUT goes; a checkpoint that it had put aside comes back.
void clean_up(const std::string& out) {
  std::error_code error;
  std::vector<std::string> leftovers;
  for (const auto& entry : fs::directory_iterator(out, error)) {
    const std::string name = entry.path().filename().string();
    if (absl::StartsWith(name, ".step-") && absl::StrContains(name, ".tmp")) leftovers.push_back(name);
  }
  for (const std::string& name : leftovers) {
    const std::string path = out + "/" + name;
    const std::string original = out + "/" + name.substr(1, name.find(".tmp") - 1);
    if (absl::EndsWith(name, kAside) && !fs::exists(original, error)) {
      fs::rename(path, original, error);
    } else {
      fs::remove_all(path, error);
    }
  }
}

// When the checkpoint's run was started; a state that cannot be read counts as the latest, so that it is not passed
// over.
int64_t run_of(const std::string& dir) {
  const auto state = read_json_file(dir + "/" + kState);
  if (!state.ok()) return std::numeric_limits<int64_t>::max();
  return json_value<int64_t>(*state, "run", 0).value_or(std::numeric_limits<int64_t>::max());
}

// "NAME was X, is now Y" for everything in `now` that differs.
std::string differences(const Json& was, const Json& now) {
  const auto text = [](const Json& value) { return value.is_string() ? value.get<std::string>() : value.dump(); };
  std::vector<std::string> out;
  for (const auto& [key, value] : now.items()) {
    const std::string before = was.is_object() && was.contains(key) ? text(was[key]) : "not noted";
    if (before != text(value)) out.push_back(absl::StrCat(key, " was ", before, ", is now ", text(value)));
  }
  return absl::StrJoin(out, "; ");
}

}  // namespace

absl::StatusOr<std::unique_ptr<OutputLock>> OutputLock::take(const std::string& out) {
  std::error_code error;
  fs::create_directories(out, error);
  if (error) return invalid("train.out: cannot make the folder ", out, ": ", error.message());
  const int descriptor = ::open(out.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return invalid("train.out: cannot open the folder ", out, ": ", std::strerror(errno));
  std::unique_ptr<OutputLock> lock(new OutputLock(descriptor));
  if (::access(out.c_str(), W_OK | X_OK) != 0) {
    return invalid("train.out: cannot write to the folder ", out, ": ", std::strerror(errno));
  }
  // Some network file systems have no locks; the run goes on without.
  if (::flock(descriptor, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    return invalid("train.out: another process trains into ", out, "; wait for it or use another folder");
  }
  clean_up(out);
  return lock;
}

OutputLock::~OutputLock() { ::close(descriptor_); }

std::string checkpoint_dir(const std::string& out, int64_t step) { return absl::StrCat(out, "/step-", step); }

absl::StatusOr<std::string> save_checkpoint(const std::string& out, DType dtype, const CheckpointContents& contents) {
  const int64_t step = contents.optimizer->steps_done();
  const std::string final_dir = checkpoint_dir(out, step);
  const std::string temporary = absl::StrCat(out, "/.step-", step, ".tmp");
  absl::Status status = catch_exceptions("cannot save the checkpoint " + final_dir, [&]() -> absl::Status {
    PARVL_RETURN_IF_ERROR(write_all(temporary, dtype, contents));
    return contents.ranks->is_first() ? publish(temporary, final_dir) : absl::OkStatus();
  });
  if (status.ok() && !contents.ranks->is_first()) return final_dir;
  if (status.ok()) status = sync_directory(out);
  std::error_code error;
  if (contents.ranks->is_first())
    fs::remove_all(temporary, error);  // after a failure the new one, else the one that was replaced
  if (!status.ok()) return with_context(status, absl::StrCat("the checkpoint of step ", step, " was not saved"));
  return final_dir;
}

std::vector<int64_t> list_checkpoints(const std::string& out) {
  std::vector<std::pair<int64_t, int64_t>> found;  // run, step
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(out, error)) {
    const std::string name = entry.path().filename().string();
    if (!absl::StartsWith(name, "step-") || name.size() == 5 || name.size() > 20) continue;
    if (name.find_first_not_of("0123456789", 5) != std::string::npos || !entry.is_directory(error)) continue;
    const int64_t step = std::stoll(name.substr(5));
    if (checkpoint_dir(out, step) == entry.path().string()) found.emplace_back(run_of(entry.path().string()), step);
  }
  std::sort(found.rbegin(), found.rend());
  std::vector<int64_t> steps;
  for (const auto& [run, step] : found) steps.push_back(step);
  return steps;
}

absl::Status check_checkpoint(const std::string& dir) {
  const std::string path = dir + "/" + kManifest;
  const absl::Status damaged = invalid("checkpoint ", dir, " is damaged: ", kManifest, " is not as it was written");
  const auto manifest = read_json_file(path);
  if (absl::IsNotFound(manifest.status())) return invalid(dir, " is no whole checkpoint: it lacks ", kManifest);
  if (!manifest.ok()) return with_context(manifest.status(), absl::StrCat("checkpoint ", dir, " is damaged"));
  if (!manifest->is_object() || !manifest->contains("files") || !manifest->contains("sha256")) return damaged;
  const Json& files = (*manifest)["files"];
  if (!files.is_object() || (*manifest)["sha256"] != sha256_hex(files.dump())) return damaged;
  for (const char* needed : {kState, kTensors, "config.json"}) {
    if (!files.contains(needed)) return damaged;
  }
  for (const auto& [file, hash] : files.items()) {
    if (absl::StrContains(file, "..")) return invalid(path, " names a file outside the checkpoint");
    const auto found = sha256_file(dir + "/" + file);
    if (absl::IsNotFound(found.status())) return invalid("checkpoint ", dir, " is damaged: ", file, " is missing");
    if (!found.ok()) return with_context(found.status(), absl::StrCat("checkpoint ", dir, " is damaged"));
    if (hash != *found)
      return invalid("checkpoint ", dir, " is damaged: ", file, " does not have the hash it was written with");
  }
  return absl::OkStatus();
}

absl::StatusOr<int64_t> load_checkpoint(const std::string& dir, const ResumeTarget& target) {
  PARVL_RETURN_IF_ERROR(check_checkpoint(dir));
  PARVL_ASSIGN_OR_RETURN(const Json state, read_json_file(dir + "/" + kState));
  PARVL_ASSIGN_OR_RETURN(const int64_t format, json_value<int64_t>(state, "format", 0));
  if (format != kFormat)
    return invalid(dir, "/", kState, " has the format ", format, "; this program reads format ", kFormat);
  const Json identity = state.value("identity", Json());
  const std::string differs = differences(identity, target.identity);
  if (!differs.empty()) {
    return invalid("checkpoint ", dir, " belongs to another run: ", differs,
                   "; put the recipe back, use another train.out, or set train.resume to never");
  }
  PARVL_ASSIGN_OR_RETURN(const int64_t step, json_value<int64_t>(state, "step", -1));
  PARVL_ASSIGN_OR_RETURN(const int64_t updates, json_value<int64_t>(state, "updates", -1));
  PARVL_ASSIGN_OR_RETURN(const int64_t run, json_value<int64_t>(state, "run", 0));
  if (step < 0 || updates < 0 || updates > step) return invalid(dir, "/", kState, " has no sound 'step' and 'updates'");
  PARVL_RETURN_IF_ERROR(load_weights(*target.model, dir));
  PARVL_RETURN_IF_ERROR(load_optimizer(dir + "/" + kTensors, target.model->params(), *target.optimizer));
  target.optimizer->refresh_values();
  target.optimizer->set_progress(step, updates);
  return run;
}

}  // namespace parvl
