// What sources and sinks say to each other, on both lanes: a header of magic, kind and length, then the message. After
// the answer to a Pull over TCP the tensors' bytes follow, as far as credit was given.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "parvl/base/status.h"
#include "parvl/comm/transfer/transfer_handle.h"

namespace parvl {

inline constexpr uint32_t kTransferVersion = 1;
inline constexpr size_t kTransferHeaderBytes = 12;
inline constexpr size_t kMaxTransferMessageBytes = 2048;  // without the header
inline constexpr size_t kMaxTransferTokenBytes = 256;

// The first message of a connection, from the sink.
struct TransferHello {
  uint32_t version = kTransferVersion;
  TransferLane lane = TransferLane::kSharedMemory;
  std::string token;
  std::string source;  // whom it means
  int64_t source_epoch = 0;
  std::string reader;  // who it is
  int64_t reader_epoch = 0;
};

struct TransferPull {
  TransferId item;
  bool wants_descriptor = true;  // shared memory: the sink has no mapping of the slab yet
  int64_t credit = 0;            // TCP: so many bytes of tensors may be sent
};

// To a Hello or a Pull, from the source; the descriptor of the slab comes with it where it was wanted.
struct TransferAnswer {
  absl::StatusCode code = absl::StatusCode::kOk;
  std::string message;
  int64_t slab = 0;
  int64_t slab_bytes = 0;
  int64_t payload_bytes = 0;
};

// The sink no longer reads the item's shared memory.
struct TransferRelease {
  TransferId item;
  bool good = true;  // it had what it came for
};

// So many bytes more may be sent.
struct TransferCredit {
  int64_t bytes = 0;
};

using TransferMessage = std::variant<TransferHello, TransferPull, TransferAnswer, TransferRelease, TransferCredit>;

// With the header. Texts that are too long are cut.
std::string encode_message(const TransferMessage& message);
// The length of the message that this header (kTransferHeaderBytes) announces.
absl::StatusOr<size_t> read_header(std::string_view header);
// `header` as before; `body` of the announced length.
absl::StatusOr<TransferMessage> decode_message(std::string_view header, std::string_view body);

// Messages out of a stream that comes in pieces. Holds at most one message and one piece.
class MessageReader {
 public:
  void append(std::string_view bytes) { buffer_.append(bytes); }
  // The next whole message; nothing: more bytes are needed. After an error the stream is of no use.
  absl::StatusOr<std::optional<TransferMessage>> next();

 private:
  std::string buffer_;
};

// Takes the same time for every `given` of one length.
bool same_token(std::string_view given, std::string_view expected);

}  // namespace parvl
