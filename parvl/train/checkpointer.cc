#include "parvl/train/checkpointer.h"

#include <absl/strings/str_join.h>

#include <filesystem>

#include "parvl/base/file.h"
#include "parvl/models/checkpoint.h"
#include "parvl/train/checkpoint_folder.h"
#include "parvl/train/checkpoint_manifest.h"
#include "parvl/train/state_shards.h"

namespace parvl {
namespace {

namespace fs = std::filesystem;

absl::Status make_folder(const std::string& dir) {
  return catch_exceptions("cannot make the folder " + dir, [&] {
    fs::remove_all(dir);
    fs::create_directories(dir + "/trainer");
    return absl::OkStatus();
  });
}

// What the first rank writes when all have written their parts.
absl::Status write_the_rest(const std::string& dir, const CheckpointContents& contents,
                            const std::map<std::string, TensorFileHashes>& weights) {
  for (int64_t rank = 0; rank < contents.ranks->world(); ++rank) {
    const std::string file = state_file(rank, contents.ranks->world()) + ".json";
    if (!fs::exists(dir + "/" + file))
      return failed("rank ", rank, " wrote its part elsewhere; give all ranks a train.out that they share");
  }
  const Json state = {{"step", contents.optimizer->steps_done()},
                      {"updates", contents.optimizer->updates_done()},
                      {"run", contents.run},
                      {"identity", contents.identity}};
  PARVL_RETURN_IF_ERROR(write_file_atomically(dir + "/" + kStateFile, state.dump(2) + "\n"));
  PARVL_RETURN_IF_ERROR(write_manifest(dir, weights));
  PARVL_RETURN_IF_ERROR(sync_directory(dir + "/trainer"));
  return sync_directory(dir);
}

// All ranks go on together or not at all, so that none waits and none writes when this returns.
absl::Status write_all(const std::string& dir, DType dtype, const CheckpointContents& contents) {
  const RunRanks& ranks = *contents.ranks;
  const bool first = ranks.is_first();
  PARVL_RETURN_IF_ERROR(ranks.agree(first ? make_folder(dir) : absl::OkStatus()));
  // Of a parameter in 16 bits these are the values; the masters are part of the optimizer's state.
  const auto whole = [&](const Param& param) {
    return ranks.whole(contents.model->params(), param, param.value,
                       at::TensorOptions().dtype(to_scalar_type(dtype)).device(contents.optimizer->device()));
  };
  std::map<std::string, TensorFileHashes> weights;
  const SaveOptions options{
      .dtype = dtype, .copy_from = contents.copy_from, .whole = whole, .write = first, .hashes = &weights};
  absl::Status status = save_weights(*contents.model, dir, options);
  if (status.ok()) {
    status = catch_exceptions("cannot write the optimizer's state",
                              [&] { return write_state(dir, *contents.optimizer, ranks.rank(), ranks.world()); });
  }
  PARVL_RETURN_IF_ERROR(ranks.agree(status));
  return first ? write_the_rest(dir, contents, weights) : absl::OkStatus();
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

absl::StatusOr<std::string> save_checkpoint(const std::string& out, DType dtype, const CheckpointContents& contents) {
  const int64_t step = contents.optimizer->steps_done();
  const std::string final_dir = checkpoint_dir(out, step);
  const std::string temporary = unpublished_dir(out, step, contents.writer);
  const bool first = contents.ranks->is_first();
  absl::Status status = catch_exceptions("cannot save the checkpoint " + final_dir, [&]() -> absl::Status {
    PARVL_RETURN_IF_ERROR(write_all(temporary, dtype, contents));
    if (!first) return absl::OkStatus();
    PARVL_RETURN_IF_ERROR(publish_checkpoint(temporary, final_dir));
    return sync_directory(out);
  });
  std::error_code error;
  if (first) fs::remove_all(temporary, error);  // after a failure the new one, else the one that was replaced
  status = contents.ranks->agree(status);
  if (!status.ok()) return with_context(status, absl::StrCat("the checkpoint of step ", step, " was not saved"));
  return final_dir;
}

absl::Status check_checkpoint(const std::string& dir, const CheckShare& share) {
  PARVL_ASSIGN_OR_RETURN(const CheckpointManifest manifest, read_manifest(dir));
  int64_t next = 0;
  const auto mine = [&](size_t) { return next++ % share.count == share.index; };
  const auto check = [&]() -> absl::Status {
    for (const auto& [file, hash] : manifest.files) {
      if (mine(0)) PARVL_RETURN_IF_ERROR(read_checked(dir, manifest, file).status());
    }
    for (const auto& [file, hashes] : manifest.weights) {
      PARVL_RETURN_IF_ERROR(check_tensor_file(dir + "/" + file, hashes, file, mine));
    }
    PARVL_ASSIGN_OR_RETURN(const std::vector<StateShard> shards, read_state_shards(dir, manifest));
    for (const StateShard& shard : shards) {
      if (shard.slices.empty()) continue;
      PARVL_RETURN_IF_ERROR(check_tensor_file(dir + "/" + shard.file, shard.hashes, shard.file, mine));
    }
    return absl::OkStatus();
  };
  return with_context(check(), absl::StrCat("checkpoint ", dir, " is damaged"));
}

absl::StatusOr<int64_t> load_checkpoint(const std::string& dir, const ResumeTarget& target) {
  PARVL_ASSIGN_OR_RETURN(const CheckpointManifest manifest, read_manifest(dir));
  PARVL_ASSIGN_OR_RETURN(const std::string text, read_checked(dir, manifest, kStateFile));
  PARVL_ASSIGN_OR_RETURN(const Json state, parse_json(text, dir + "/" + kStateFile));
  const Json identity = state.value("identity", Json());
  const std::string differs = differences(identity, target.identity);
  if (!differs.empty()) {
    return invalid("checkpoint ", dir, " belongs to another run: ", differs,
                   "; put the recipe back, use another train.out, or set train.resume to never");
  }
  PARVL_ASSIGN_OR_RETURN(const int64_t step, json_value<int64_t>(state, "step", -1));
  PARVL_ASSIGN_OR_RETURN(const int64_t updates, json_value<int64_t>(state, "updates", -1));
  PARVL_ASSIGN_OR_RETURN(const int64_t run, json_value<int64_t>(state, "run", 0));
  if (step < 0 || updates < 0 || updates > step)
    return invalid(dir, "/", kStateFile, " has no sound 'step' and 'updates'");
  PARVL_RETURN_IF_ERROR(load_weights(*target.model, dir));
  PARVL_ASSIGN_OR_RETURN(const std::vector<StateShard> shards, read_state_shards(dir, manifest));
  PARVL_RETURN_IF_ERROR(load_state(dir, shards, *target.optimizer));
  target.optimizer->refresh_values();
  target.optimizer->set_progress(step, updates);
  return run;
}

}  // namespace parvl
