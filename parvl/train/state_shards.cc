#include "parvl/train/state_shards.h"

#include <ATen/ATen.h>
#include <absl/strings/match.h>

#include <cstring>
#include <map>

namespace parvl {
namespace {

std::string name_of(const StatePiece& piece) { return absl::StrCat(piece.param->name, ".", piece.state); }

TensorSlice slice_of(const StatePiece& piece) {
  const Param& param = *piece.param;
  TensorSlice out{param.numel(), 0, param.numel(), piece.begin, piece.begin + piece.values.numel()};
  if (param.part.count == 1) return out;
  const auto dim = static_cast<size_t>(param.shard.dim);
  int64_t inner = 1;
  for (size_t d = dim + 1; d < param.shape.size(); ++d) inner *= param.shape[d];
  const auto [first, last] = param.part_range(param.part.index);
  out.period = param.shape[dim] / param.shard.blocks * inner;
  out.offset = first * inner;
  out.length = (last - first) * inner;
  return out;
}

absl::StatusOr<StateShard> shard_from_json(const Json& json, const std::string& file) {
  StateShard out;
  out.file = file;
  if (!json.is_object()) return invalid("not an object");
  PARVL_ASSIGN_OR_RETURN(out.dtype, json_value<std::string>(json, "dtype", ""));
  PARVL_ASSIGN_OR_RETURN(out.hashes, hashes_from_json(json.value("file", Json())));
  const Json slices = json.value("slices", Json());
  if (!slices.is_array() || slices.size() != out.hashes.tensors.size()) return invalid("not one slice a tensor");
  for (const Json& entry : slices) {
    if (!entry.is_object()) return invalid("a slice that is no object");
    PARVL_ASSIGN_OR_RETURN(const int64_t numel, json_value<int64_t>(entry, "numel", 0));
    PARVL_ASSIGN_OR_RETURN(const TensorSlice slice, slice_from_json(entry.value("slice", Json()), numel));
    out.numels.push_back(numel);
    out.slices.push_back(slice);
  }
  return out;
}

struct StoredSlice {
  const StateShard* shard = nullptr;
  size_t index = 0;
};

// Files are opened when something is read from them.
class Reader {
 public:
  Reader(const std::string& dir, const std::vector<StateShard>& shards, const std::string& dtype)
      : dir_(dir), dtype_(dtype) {
    for (const StateShard& shard : shards) {
      for (size_t i = 0; i < shard.slices.size(); ++i) stored_[shard.hashes.tensors[i].first].push_back({&shard, i});
    }
  }

  absl::Status fill(const StatePiece& piece) {
    const std::string name = name_of(piece);
    const TensorSlice wanted = slice_of(piece);
    const at::Tensor host = piece.values.is_cpu() ? piece.values : at::empty_like(piece.values, at::kCPU);
    const auto value = static_cast<int64_t>(host.element_size());
    int64_t filled = 0;
    for (const StoredSlice& stored : stored_[name]) {
      const TensorSlice& slice = stored.shard->slices[stored.index];
      if (stored.shard->numels[stored.index] != piece.param->numel() || stored.shard->dtype != dtype_)
        return invalid("'", name, "' in ", stored.shard->file, " has another size or type than this run's");
      if (for_common_runs(wanted, slice, [](int64_t, int64_t, int64_t) {}) == 0) continue;
      PARVL_ASSIGN_OR_RETURN(const CheckedTensorFile* file, open(*stored.shard));
      const std::string_view bytes = file->bytes(stored.index);
      if (static_cast<int64_t>(bytes.size()) != slice.size() * value)
        return invalid("'", name, "' in ", stored.shard->file, " is not as long as its slice");
      auto* to = static_cast<char*>(host.data_ptr());
      filled += for_common_runs(wanted, slice, [&](int64_t here, int64_t there, int64_t count) {
        std::memcpy(to + here * value, bytes.data() + there * value, static_cast<size_t>(count * value));
      });
    }
    if (filled != wanted.size())
      return invalid("it lacks '", name, "', or values of it; the checkpoint is of another optimizer");
    if (!piece.values.is_cpu()) at::Tensor(piece.values).copy_(host);
    return absl::OkStatus();
  }

 private:
  absl::StatusOr<const CheckedTensorFile*> open(const StateShard& shard) {
    const auto found = files_.find(&shard);
    if (found != files_.end()) return &found->second;
    PARVL_ASSIGN_OR_RETURN(files_[&shard], open_tensor_file(dir_ + "/" + shard.file, shard.hashes, shard.file));
    return &files_[&shard];
  }

  const std::string dir_, dtype_;
  std::map<std::string, std::vector<StoredSlice>> stored_;
  std::map<const StateShard*, CheckedTensorFile> files_;
};

}  // namespace

std::string state_file(int64_t rank, int64_t world) { return absl::StrCat("trainer/state-", rank, "-of-", world); }

absl::Status write_state(const std::string& dir, const Optimizer& optimizer, int64_t rank, int64_t world) {
  const std::string file = state_file(rank, world);
  const char* dtype = safetensors_dtype(optimizer.state_dtype());
  std::vector<StatePiece> pieces;
  std::vector<TensorEntry> entries;
  Json slices = Json::array();
  for (const StatePiece& piece : optimizer.state_pieces()) {
    if (!piece.counts) continue;
    const int64_t numel = piece.values.numel();
    entries.push_back({name_of(piece), dtype, {numel}, 0, static_cast<uint64_t>(piece.values.nbytes())});
    slices.push_back({{"numel", piece.param->numel()}, {"slice", to_json(slice_of(piece))}});
    pieces.push_back(piece);
  }
  TensorFileHashes hashes{0, std::string(64, '0'), {}};
  if (!pieces.empty()) {
    PARVL_ASSIGN_OR_RETURN(auto writer, TensorFileWriter::create(dir + "/" + file + ".safetensors", entries));
    for (const StatePiece& piece : pieces) {
      const at::Tensor values = piece.values.cpu();
      PARVL_RETURN_IF_ERROR(writer->append(values.data_ptr(), values.nbytes()));
    }
    PARVL_ASSIGN_OR_RETURN(hashes, writer->finish());
  }
  const Json json = {{"dtype", dtype}, {"file", to_json(hashes)}, {"slices", slices}};
  return write_file_atomically(dir + "/" + file + ".json", json.dump(1) + "\n");
}

absl::StatusOr<std::vector<StateShard>> read_state_shards(const std::string& dir, const CheckpointManifest& manifest) {
  std::vector<StateShard> out;
  for (const auto& [file, hash] : manifest.files) {
    if (!absl::StartsWith(file, "trainer/state-")) continue;
    PARVL_ASSIGN_OR_RETURN(const std::string text, read_checked(dir, manifest, file));
    PARVL_ASSIGN_OR_RETURN(const Json json, parse_json(text, file));
    const std::string stem = file.substr(0, file.size() - std::string_view(".json").size());
    absl::StatusOr<StateShard> shard = shard_from_json(json, stem + ".safetensors");
    PARVL_RETURN_IF_ERROR(with_context(shard.status(), file));
    out.push_back(*std::move(shard));
  }
  return out;
}

absl::Status load_state(const std::string& dir, const std::vector<StateShard>& shards, const Optimizer& optimizer) {
  Reader reader(dir, shards, safetensors_dtype(optimizer.state_dtype()));
  for (const StatePiece& piece : optimizer.state_pieces()) {
    PARVL_RETURN_IF_ERROR(with_context(reader.fill(piece), absl::StrCat("checkpoint ", dir)));
  }
  return absl::OkStatus();
}

}  // namespace parvl
