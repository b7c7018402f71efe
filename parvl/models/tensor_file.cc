#include "parvl/models/tensor_file.h"

#include "parvl/base/check.h"
#include "parvl/base/text.h"

namespace parvl {

absl::StatusOr<std::unique_ptr<TensorFileWriter>> TensorFileWriter::create(const std::string& path,
                                                                           std::vector<TensorEntry> tensors) {
  PARVL_ASSIGN_OR_RETURN(auto file, FileWriter::create(path));
  const std::string header = make_safetensors_header(tensors);
  PARVL_RETURN_IF_ERROR(file->append(header.data(), header.size()));
  std::unique_ptr<TensorFileWriter> out(new TensorFileWriter(std::move(file), std::move(tensors)));
  out->hashes_.bytes = header.size();
  out->hashes_.header = sha256_hex(header);
  return out;
}

absl::Status TensorFileWriter::append(const void* data, size_t bytes) {
  const size_t index = hashes_.tensors.size();
  PARVL_CHECK(index < tensors_.size() && bytes == tensors_[index].bytes, "a tensor that the header does not announce");
  hashes_.tensors.emplace_back(tensors_[index].name, sha256_hex({static_cast<const char*>(data), bytes}));
  hashes_.bytes += bytes;
  return file_->append(data, bytes);
}

absl::StatusOr<TensorFileHashes> TensorFileWriter::finish() {
  PARVL_CHECK(hashes_.tensors.size() == tensors_.size(), "a tensor that the header announces is not there");
  PARVL_RETURN_IF_ERROR(file_->finish());
  return std::move(hashes_);
}

absl::StatusOr<CheckedTensorFile> open_tensor_file(const std::string& path, const TensorFileHashes& hashes,
                                                   const std::string& name) {
  CheckedTensorFile out;
  absl::StatusOr<std::shared_ptr<MappedFile>> mapped = MappedFile::open(path);
  if (absl::IsNotFound(mapped.status())) return invalid(name, " is missing");
  PARVL_RETURN_IF_ERROR(mapped.status());
  out.mapped = *std::move(mapped);
  const std::string_view bytes = out.mapped->bytes();
  if (bytes.size() != hashes.bytes)
    return invalid(name, " has ", bytes.size(), " bytes, but was written with ", hashes.bytes);
  const absl::StatusOr<std::vector<TensorEntry>> entries = read_safetensors_header(bytes, name);
  const size_t header = entries.ok() && !entries->empty() ? entries->front().offset : bytes.size();
  if (!entries.ok() || sha256_hex(bytes.substr(0, header)) != hashes.header)
    return invalid("the header of ", name, " does not have the hash it was written with");
  out.entries = *entries;
  bool same = out.entries.size() == hashes.tensors.size();
  for (size_t i = 0; same && i < out.entries.size(); ++i) same = out.entries[i].name == hashes.tensors[i].first;
  if (!same) return invalid(name, " does not hold the tensors that it was written with");
  return out;
}

absl::Status check_tensor_file(const std::string& path, const TensorFileHashes& hashes, const std::string& name,
                               const std::function<bool(size_t)>& wanted) {
  PARVL_ASSIGN_OR_RETURN(const CheckedTensorFile file, open_tensor_file(path, hashes, name));
  for (size_t i = 0; i < file.entries.size(); ++i) {
    if (!wanted(i)) continue;
    if (sha256_hex(file.bytes(i)) != hashes.tensors[i].second) {
      return invalid("tensor ", excerpt(file.entries[i].name, 200), " in ", name,
                     " does not have the hash it was written with");
    }
    file.mapped->drop(file.entries[i].offset, file.entries[i].bytes);  // it need not stay in memory
  }
  return absl::OkStatus();
}

}  // namespace parvl
