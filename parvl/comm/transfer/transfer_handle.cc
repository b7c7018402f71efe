#include "parvl/comm/transfer/transfer_handle.h"

#include <absl/strings/escaping.h>

#include <limits>
#include <unordered_set>

#include "parvl/base/text.h"
#include "parvl/comm/transfer/transfer_bytes.h"

namespace parvl {
namespace {

constexpr uint32_t kMagic = 0x48585650;  // "PVXH"
constexpr int64_t kAlignment = 64;
constexpr int64_t kLastDType = static_cast<int64_t>(DType::kFloat64);
constexpr size_t kMaxAddressBytes = 107;  // of a socket's address

int64_t round_up(int64_t value) { return (value + kAlignment - 1) / kAlignment * kAlignment; }

// Bytes of the values; nothing passes kMaxTransferBytes on the way.
absl::StatusOr<int64_t> tensor_bytes(const TransferTensor& tensor) {
  if (static_cast<int64_t>(tensor.shape.size()) > kMaxTransferDims) {
    return invalid("the tensor ", excerpt(tensor.name), " has ", tensor.shape.size(), " dims; the limit is ",
                   kMaxTransferDims);
  }
  int64_t bytes = dtype_bytes(tensor.dtype);
  bool empty = false;
  for (const int64_t size : tensor.shape) {
    if (size < 0 || size > kMaxTransferBytes) {
      return invalid("the tensor ", excerpt(tensor.name), " has a dim of ", size);
    }
    empty |= size == 0;
    if (size > 0 && bytes > kMaxTransferBytes / size) {
      return invalid("the tensor ", excerpt(tensor.name), " is over ", kMaxTransferBytes, " bytes");
    }
    bytes *= size > 0 ? size : 1;
  }
  return empty ? 0 : bytes;
}

TransferTensor read_tensor(ByteReader& reader) {
  TransferTensor out;
  out.name = reader.text(kMaxTransferNameBytes);
  const auto dtype = reader.number<uint8_t>();
  out.dtype = static_cast<DType>(dtype <= kLastDType ? dtype : 0);
  const auto dims = reader.number<uint8_t>();
  for (int i = 0; i < dims && reader.ok(); ++i) out.shape.push_back(reader.number<int64_t>());
  if (dtype > kLastDType) out.name.clear();  // which place_tensors refuses
  return out;
}

}  // namespace

const char* to_string(TransferLane lane) { return lane == TransferLane::kSharedMemory ? "shared memory" : "tcp"; }

absl::StatusOr<int64_t> place_tensors(std::vector<TransferTensor>& tensors) {
  if (tensors.empty() || static_cast<int64_t>(tensors.size()) > kMaxTransferTensors) {
    return invalid("an item has 1 to ", kMaxTransferTensors, " tensors, not ", tensors.size());
  }
  std::unordered_set<std::string_view> names;
  int64_t end = 0;
  for (TransferTensor& tensor : tensors) {
    if (tensor.name.empty() || static_cast<int64_t>(tensor.name.size()) > kMaxTransferNameBytes) {
      return invalid("a tensor's name has 1 to ", kMaxTransferNameBytes, " bytes, not ", tensor.name.size());
    }
    if (!names.insert(tensor.name).second) return invalid("the tensor ", excerpt(tensor.name), " is there twice");
    PARVL_ASSIGN_OR_RETURN(tensor.bytes, tensor_bytes(tensor));
    tensor.offset = round_up(end);
    end = tensor.offset + tensor.bytes;
    if (end > kMaxTransferBytes) return invalid("the tensors are over ", kMaxTransferBytes, " bytes");
  }
  return end;
}

int64_t TransferHandle::payload_bytes() const {
  int64_t out = 0;
  for (const TransferTensor& tensor : tensors) out += tensor.bytes;
  return out;
}

int64_t TransferHandle::extent_bytes() const {
  return tensors.empty() ? 0 : tensors.back().offset + tensors.back().bytes;
}

std::string TransferHandle::encode() const {
  ByteWriter out;
  out.number(kMagic);
  out.text(source);
  out.number(epoch);
  out.number(item.value);
  out.text(host);
  out.text(local_address);
  out.text(tcp_address);
  out.number(slab);
  out.number(checksum);
  out.number(static_cast<uint16_t>(tensors.size()));
  for (const TransferTensor& tensor : tensors) {
    out.text(tensor.name);
    out.number(static_cast<uint8_t>(tensor.dtype));
    out.number(static_cast<uint8_t>(tensor.shape.size()));
    for (const int64_t size : tensor.shape) out.number(size);
  }
  return out.take();
}

absl::StatusOr<TransferHandle> TransferHandle::decode(std::string_view bytes) {
  if (static_cast<int64_t>(bytes.size()) > kMaxTransferHandleBytes) {
    return invalid("a transfer handle of ", bytes.size(), " bytes; the limit is ", kMaxTransferHandleBytes);
  }
  ByteReader reader(bytes);
  if (reader.number<uint32_t>() != kMagic) return invalid("no transfer handle: it begins with something else");
  TransferHandle out;
  out.source = reader.text(kMaxTransferNameBytes);
  out.epoch = reader.number<int64_t>();
  out.item.value = reader.number<int64_t>();
  out.host = reader.text(kMaxTransferNameBytes);
  out.local_address = reader.text(kMaxAddressBytes);
  out.tcp_address = reader.text(kMaxAddressBytes);
  out.slab = reader.number<int64_t>();
  out.checksum = reader.number<uint64_t>();
  const auto count = reader.number<uint16_t>();
  for (int i = 0; i < count && i <= kMaxTransferTensors && reader.ok(); ++i) out.tensors.push_back(read_tensor(reader));
  if (!reader.ends_well()) return invalid("a transfer handle that is cut, too long or out of bounds");
  PARVL_RETURN_IF_ERROR(with_context(place_tensors(out.tensors).status(), "a transfer handle"));
  return out;
}

std::string TransferHandle::to_text() const { return absl::WebSafeBase64Escape(encode()); }

absl::StatusOr<TransferHandle> TransferHandle::from_text(std::string_view text) {
  std::string bytes;
  if (!absl::WebSafeBase64Unescape(absl::string_view(text.data(), text.size()), &bytes)) {
    return invalid("a transfer handle that is no base64");
  }
  return decode(bytes);
}

}  // namespace parvl
