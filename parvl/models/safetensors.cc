#include "parvl/models/safetensors.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "parvl/base/json.h"
#include "parvl/base/text.h"

namespace parvl {
namespace {

constexpr uint64_t kMaxHeader = 100u << 20;  // the format's own limit
constexpr size_t kMaxDims = 8;

// Bytes a value of every type that the format defines; 0 for an unknown one.
uint64_t value_bytes(const std::string& dtype) {
  if (dtype == "F64" || dtype == "I64" || dtype == "U64") return 8;
  if (dtype == "F32" || dtype == "I32" || dtype == "U32") return 4;
  if (dtype == "BF16" || dtype == "F16" || dtype == "I16" || dtype == "U16") return 2;
  if (dtype == "I8" || dtype == "U8" || dtype == "BOOL" || dtype.rfind("F8_", 0) == 0) return 1;
  return 0;
}

// Names in an object's text, which a parsed object holds once each.
size_t count_names(std::string_view text) {
  size_t names = 0;
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      i += c == '\\';
      in_string = c != '"';
    } else if (c == '"') {
      in_string = true;
    } else if (c == '{' || c == '[') {
      ++depth;
    } else if (c == '}' || c == ']') {
      --depth;
    } else if (c == ':' && depth == 1) {
      ++names;
    }
  }
  return names;
}

absl::StatusOr<TensorEntry> parse_entry(const std::string& name, const Json& value, uint64_t data_bytes) {
  const auto bad = [&](const std::string& why) { return invalid("tensor ", excerpt(name, 200), " ", why); };
  TensorEntry entry;
  entry.name = name;
  if (!value.is_object() || !value.contains("dtype") || !value.contains("shape") || !value.contains("data_offsets")) {
    return bad("lacks dtype, shape or data_offsets");
  }
  const Json &dtype = value["dtype"], &shape = value["shape"], &offsets = value["data_offsets"];
  if (!dtype.is_string() || value_bytes(dtype.get<std::string>()) == 0) return bad("has an unknown dtype");
  entry.dtype = dtype.get<std::string>();
  if (!shape.is_array() || shape.size() > kMaxDims) return bad("has a malformed shape");
  uint64_t bytes = value_bytes(entry.dtype);
  for (const Json& size : shape) {
    if (!size.is_number_unsigned() || size.get<uint64_t>() > (uint64_t{1} << 40)) return bad("has a malformed shape");
    entry.shape.push_back(size.get<int64_t>());
    if (__builtin_mul_overflow(bytes, size.get<uint64_t>(), &bytes)) return bad("is larger than any file");
  }
  if (!offsets.is_array() || offsets.size() != 2 || !offsets[0].is_number_unsigned() ||
      !offsets[1].is_number_unsigned()) {
    return bad("has malformed data_offsets");
  }
  const uint64_t begin = offsets[0].get<uint64_t>(), end = offsets[1].get<uint64_t>();
  if (begin > end || end > data_bytes) return bad("lies outside the file; the file is cut short or damaged");
  if (end - begin != bytes) return bad("has another size than its shape and dtype say");
  entry.offset = begin;
  entry.bytes = bytes;
  return entry;
}

}  // namespace

absl::StatusOr<std::vector<TensorEntry>> read_safetensors_header(std::string_view file, const std::string& name) {
  const auto context = [&](const absl::Status& status) { return with_context(status, name); };
  if (file.size() < 8) return invalid(name, ": too short to be a safetensors file");
  uint64_t length;
  std::memcpy(&length, file.data(), 8);
  if (length > kMaxHeader || length > file.size() - 8) {
    return invalid(name, ": not a safetensors file, or cut short (its header would have ", length, " bytes)");
  }
  auto header = parse_json(file.substr(8, length), name + " header", {.max_bytes = kMaxHeader, .max_depth = 8});
  if (!header.ok()) return header.status();
  if (!header->is_object()) return invalid(name, ": the header is not a JSON object");
  if (count_names(file.substr(8, length)) != header->size())
    return invalid(name, ": its header has a tensor's name twice");
  const uint64_t data_begin = 8 + length;
  std::vector<TensorEntry> out;
  for (const auto& [key, value] : header->items()) {
    if (key == "__metadata__") continue;
    auto entry = parse_entry(key, value, file.size() - data_begin);
    if (!entry.ok()) return context(entry.status());
    out.push_back(*std::move(entry));
  }
  std::sort(out.begin(), out.end(), [](const TensorEntry& a, const TensorEntry& b) {
    return std::tie(a.offset, a.bytes) < std::tie(b.offset, b.bytes);
  });
  uint64_t next = 0;
  for (TensorEntry& entry : out) {
    if (entry.offset != next)
      return invalid(name, ": tensor ", excerpt(entry.name, 200), " overlaps another or leaves a gap");
    next = entry.offset + entry.bytes;
    entry.offset += data_begin;
  }
  if (data_begin + next != file.size()) return invalid(name, ": has bytes behind its last tensor");
  return out;
}

const char* safetensors_dtype(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "F32";
    case DType::kBFloat16:
      return "BF16";
    case DType::kFloat16:
      return "F16";
    case DType::kFloat64:
      return "F64";
  }
  return "?";
}

absl::StatusOr<DType> parse_safetensors_dtype(const std::string& name) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
    if (name == safetensors_dtype(dtype)) return dtype;
  }
  return invalid("dtype ", excerpt(name), " is not supported (F32, BF16, F16 and F64 are)");
}

std::string make_safetensors_header(std::vector<TensorEntry>& tensors) {
  nlohmann::ordered_json header;
  header["__metadata__"] = {{"format", "pt"}};
  uint64_t offset = 0;
  for (TensorEntry& tensor : tensors) {
    header[tensor.name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {offset, offset + tensor.bytes}}};
    tensor.offset = offset;
    offset += tensor.bytes;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t length = text.size();
  std::string out(8, '\0');
  std::memcpy(out.data(), &length, 8);
  for (TensorEntry& tensor : tensors) tensor.offset += 8 + length;
  return out + text;
}

}  // namespace parvl
