// What comes from others in a transfer: a handle as bytes, the same bytes as text, and as the stream of a connection.
// All are read or refused with a good message; what was read is written again as the same bytes; and a stream says the
// same in one piece and in many.
#include "parvl/comm/transfer/transfer_handle.h"
#include "parvl/comm/transfer/transfer_wire.h"
#include "tests/fuzz/fuzz.h"

namespace {

void try_handle(std::string_view bytes) {
  const auto handle = parvl::TransferHandle::decode(bytes);
  if (!handle.ok()) {
    require_good_message(std::string(handle.status().message()));
    return;
  }
  FUZZ_REQUIRE(handle->encode() == bytes);
  FUZZ_REQUIRE(handle->payload_bytes() >= 0 && handle->payload_bytes() <= handle->extent_bytes());
  FUZZ_REQUIRE(handle->extent_bytes() <= parvl::kMaxTransferBytes);
  const auto again = parvl::TransferHandle::from_text(handle->to_text());
  FUZZ_REQUIRE(again.ok() && again->encode() == bytes);
}

// What a stream says until its end or its first error, as bytes.
std::string read_stream(std::string_view bytes, size_t piece) {
  parvl::MessageReader reader;
  std::string out;
  for (size_t at = 0; at < bytes.size(); at += piece) {
    reader.append(bytes.substr(at, piece));
    for (;;) {
      const auto message = reader.next();
      if (!message.ok()) {
        require_good_message(std::string(message.status().message()));
        return out + "wrong";
      }
      if (!*message) break;
      const std::string written = parvl::encode_message(**message);
      const auto length = parvl::read_header(written);
      FUZZ_REQUIRE(length.ok() && written.size() == parvl::kTransferHeaderBytes + *length);
      out += written;
    }
  }
  return out;
}

}  // namespace

std::vector<std::string> fuzz_seeds() {
  parvl::TransferHandle handle;
  handle.source = "encode-0";
  handle.epoch = 3;
  handle.host = "boot net:[1]";
  handle.local_address = "parvl/encode-0/e3/1.0";
  handle.tcp_address = "10.0.0.3:4711";
  handle.tensors = {{"features", parvl::DType::kBFloat16, {4, 5}}, {"scale", parvl::DType::kFloat64, {}}};
  parvl::TransferHello hello;
  hello.token = "a token of sixteen bytes or more";
  hello.source = "encode-0";
  hello.reader = "llm-0";
  parvl::TransferAnswer answer;
  answer.message = "item 5 was dropped";
  const std::string pull = parvl::encode_message(parvl::TransferPull{parvl::TransferId{1}, true, 1000});
  return {handle.encode(), handle.to_text(),
          parvl::encode_message(hello) + pull + parvl::encode_message(parvl::TransferCredit{500}),
          parvl::encode_message(answer),
          pull + parvl::encode_message(parvl::TransferRelease{parvl::TransferId{1}, true})};
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  try_handle(bytes);
  const auto from_text = parvl::TransferHandle::from_text(bytes);
  if (!from_text.ok()) require_good_message(std::string(from_text.status().message()));
  const std::string whole = read_stream(bytes, size + 1);
  FUZZ_REQUIRE(read_stream(bytes, 1) == whole);
  FUZZ_REQUIRE(read_stream(bytes, 7) == whole);
  return 0;
}
