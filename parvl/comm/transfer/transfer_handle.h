// What a receiver needs to fetch a set of named tensors: plain data, sent along with the request that needs them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "parvl/base/ids.h"
#include "parvl/base/status.h"
#include "parvl/plan/model_spec.h"

namespace parvl {

using TransferId = StrongId<struct TransferTag, int64_t>;  // of a source's items; never used twice

enum class TransferLane { kSharedMemory, kTcp };
const char* to_string(TransferLane lane);  // "shared memory", "tcp"

struct TransferTensor {
  std::string name;
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;
  // Set by place_tensors: where its values, one after another, lie in the item's memory.
  int64_t offset = 0;
  int64_t bytes = 0;
};

// Beyond these a layout or a handle is refused, whoever sent it.
inline constexpr int64_t kMaxTransferTensors = 1024;
inline constexpr int64_t kMaxTransferNameBytes = 256;
inline constexpr int64_t kMaxTransferDims = 8;
inline constexpr int64_t kMaxTransferBytes = int64_t{1} << 40;
inline constexpr int64_t kMaxTransferHandleBytes = int64_t{1} << 20;

// Sets offsets (multiples of 64) and bytes from names, types and shapes; gives the size of the whole. InvalidArgument
// names the tensor: a name that is empty, too long or there twice, a negative or too large size.
absl::StatusOr<int64_t> place_tensors(std::vector<TransferTensor>& tensors);

// An item of one source, by everything that reaches it. Names carry the epoch: of another life of the source it
// reaches nothing.
struct TransferHandle {
  std::string source;  // the instance, as TransferSourceOptions::name
  int64_t epoch = 0;
  TransferId item;
  std::string host;           // host_identity() of the source
  std::string local_address;  // of the shared-memory lane: a name in the abstract socket namespace
  std::string tcp_address;    // "10.0.0.3:4711", "[fd00::3]:4711"; "": the source has no such lane
  int64_t slab = 0;           // the piece of shared memory that it lies in
  uint64_t checksum = 0;      // tensor_checksum over the tensors in order
  std::vector<TransferTensor> tensors;

  int64_t payload_bytes() const;  // of the tensors alone
  int64_t extent_bytes() const;   // with the gaps between them

  // The same as bytes (for a message's bytes field) and as text (URL-safe base64). Decoding believes nothing: what is
  // out of bounds, cut or too long is InvalidArgument.
  std::string encode() const;
  static absl::StatusOr<TransferHandle> decode(std::string_view bytes);
  std::string to_text() const;
  static absl::StatusOr<TransferHandle> from_text(std::string_view text);
};

}  // namespace parvl
