#include "parvl/comm/transfer/transfer_wire.h"

#include "parvl/comm/transfer/transfer_bytes.h"

namespace parvl {
namespace {

constexpr uint32_t kMagic = 0x54585650;  // "PVXT"
constexpr size_t kMaxTextBytes = 1024;   // of an error message
constexpr int kLastCode = 16;            // of absl::StatusCode

void write(ByteWriter& out, const TransferHello& hello) {
  out.number(hello.version);
  out.number(static_cast<uint8_t>(hello.lane));
  out.text(std::string_view(hello.token).substr(0, kMaxTransferTokenBytes));
  out.text(std::string_view(hello.source).substr(0, kMaxTransferNameBytes));
  out.number(hello.source_epoch);
  out.text(std::string_view(hello.reader).substr(0, kMaxTransferNameBytes));
  out.number(hello.reader_epoch);
}
void write(ByteWriter& out, const TransferPull& pull) {
  out.number(pull.item.value);
  out.number(static_cast<uint8_t>(pull.wants_descriptor));
  out.number(pull.credit);
}
void write(ByteWriter& out, const TransferAnswer& answer) {
  out.number(static_cast<uint8_t>(answer.code));
  out.text(std::string_view(answer.message).substr(0, kMaxTextBytes));
  out.number(answer.slab);
  out.number(answer.slab_bytes);
  out.number(answer.payload_bytes);
}
void write(ByteWriter& out, const TransferRelease& release) {
  out.number(release.item.value);
  out.number(static_cast<uint8_t>(release.good));
}
void write(ByteWriter& out, const TransferCredit& credit) { out.number(credit.bytes); }

TransferHello read_hello(ByteReader& in) {
  TransferHello out;
  out.version = in.number<uint32_t>();
  out.lane = in.number<uint8_t>() == 0 ? TransferLane::kSharedMemory : TransferLane::kTcp;
  out.token = in.text(kMaxTransferTokenBytes);
  out.source = in.text(kMaxTransferNameBytes);
  out.source_epoch = in.number<int64_t>();
  out.reader = in.text(kMaxTransferNameBytes);
  out.reader_epoch = in.number<int64_t>();
  return out;
}
TransferPull read_pull(ByteReader& in) {
  TransferPull out;
  out.item.value = in.number<int64_t>();
  out.wants_descriptor = in.number<uint8_t>() != 0;
  out.credit = in.number<int64_t>();
  return out;
}
TransferAnswer read_answer(ByteReader& in) {
  TransferAnswer out;
  const auto code = in.number<uint8_t>();
  out.code = code <= kLastCode ? static_cast<absl::StatusCode>(code) : absl::StatusCode::kUnknown;
  out.message = in.text(kMaxTextBytes);
  out.slab = in.number<int64_t>();
  out.slab_bytes = in.number<int64_t>();
  out.payload_bytes = in.number<int64_t>();
  return out;
}
TransferRelease read_release(ByteReader& in) {
  TransferRelease out;
  out.item.value = in.number<int64_t>();
  out.good = in.number<uint8_t>() != 0;
  return out;
}
TransferCredit read_credit(ByteReader& in) { return {in.number<int64_t>()}; }

}  // namespace

std::string encode_message(const TransferMessage& message) {
  ByteWriter body;
  std::visit([&body](const auto& m) { write(body, m); }, message);
  const std::string bytes = body.take();
  ByteWriter out;
  out.number(kMagic);
  out.number(static_cast<uint32_t>(message.index()));
  out.number(static_cast<uint32_t>(bytes.size()));
  return out.take() + bytes;
}

absl::StatusOr<size_t> read_header(std::string_view header) {
  ByteReader in(header.substr(0, kTransferHeaderBytes));
  if (in.number<uint32_t>() != kMagic || !in.ok()) return invalid("what came is no message of a transfer");
  in.number<uint32_t>();
  const auto length = in.number<uint32_t>();
  if (!in.ok() || length > kMaxTransferMessageBytes) return invalid("a transfer's message of ", length, " bytes");
  return length;
}

absl::StatusOr<TransferMessage> decode_message(std::string_view header, std::string_view body) {
  PARVL_ASSIGN_OR_RETURN(const size_t length, read_header(header));
  if (length != body.size()) return invalid("a transfer's message of another length than announced");
  ByteReader head(header.substr(4));
  ByteReader in(body);
  TransferMessage out;
  const auto kind = head.number<uint32_t>();
  switch (kind) {
    case 0:
      out = read_hello(in);
      break;
    case 1:
      out = read_pull(in);
      break;
    case 2:
      out = read_answer(in);
      break;
    case 3:
      out = read_release(in);
      break;
    case 4:
      out = read_credit(in);
      break;
    default:
      return invalid("a transfer's message of the unknown kind ", kind);
  }
  if (!in.ends_well()) return invalid("a transfer's message that is cut, too long or out of bounds");
  return out;
}

absl::StatusOr<std::optional<TransferMessage>> MessageReader::next() {
  const std::string_view bytes = buffer_;
  if (bytes.size() < kTransferHeaderBytes) return std::nullopt;
  const std::string_view header = bytes.substr(0, kTransferHeaderBytes);
  PARVL_ASSIGN_OR_RETURN(const size_t length, read_header(header));
  if (bytes.size() < kTransferHeaderBytes + length) return std::nullopt;
  PARVL_ASSIGN_OR_RETURN(TransferMessage out, decode_message(header, bytes.substr(kTransferHeaderBytes, length)));
  buffer_.erase(0, kTransferHeaderBytes + length);
  return out;
}

bool same_token(std::string_view given, std::string_view expected) {
  if (given.size() != expected.size()) return false;
  unsigned char difference = 0;
  for (size_t i = 0; i < given.size(); ++i) {
    difference = static_cast<unsigned char>(difference | (given[i] ^ expected[i]));
  }
  return difference == 0;
}

}  // namespace parvl
