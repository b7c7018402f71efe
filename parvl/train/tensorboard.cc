#include "parvl/train/tensorboard.h"

#include <array>
#include <bit>
#include <cstring>
#include <filesystem>

namespace parvl {
namespace {

static_assert(std::endian::native == std::endian::little, "event files are little-endian");

constexpr std::array<uint32_t, 256> make_crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = crc & 1 ? crc >> 1 ^ 0x82f63b78u : crc >> 1;
    table[i] = crc;
  }
  return table;
}

uint32_t masked_crc(std::string_view bytes) {
  const uint32_t crc = crc32c(bytes);
  return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

template <typename T>
std::string raw(T value) {
  std::string bytes(sizeof(T), '\0');
  std::memcpy(bytes.data(), &value, sizeof(T));
  return bytes;
}

// The protocol-buffer wire format of the few fields an event needs.
enum Wire { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

std::string varint(uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes += static_cast<char>(value | 0x80);
  return bytes + static_cast<char>(value);
}

std::string key(int field, Wire wire) { return varint(static_cast<uint64_t>(field << 3 | wire)); }
std::string bytes_field(int field, std::string_view bytes) {
  return key(field, kBytes) + varint(bytes.size()) + std::string(bytes);
}

// Event: 1 wall_time (double), 2 step (int64).
std::string event_head(double wall_seconds, int64_t step) {
  return key(1, kFixed64) + raw(wall_seconds) + key(2, kVarint) + varint(static_cast<uint64_t>(step));
}

}  // namespace

uint32_t crc32c(std::string_view bytes) {
  static constexpr std::array<uint32_t, 256> kTable = make_crc_table();
  uint32_t crc = 0xffffffffu;
  for (const char c : bytes) crc = kTable[(crc ^ static_cast<uint8_t>(c)) & 0xff] ^ crc >> 8;
  return ~crc;
}

absl::StatusOr<std::unique_ptr<EventWriter>> EventWriter::create(const std::string& folder, double wall_seconds) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) return failed("cannot make the folder ", folder, ": ", error.message());
  const std::string stem = absl::StrCat(folder, "/events.out.tfevents.", static_cast<int64_t>(wall_seconds), ".parvl");
  std::string path = stem;
  for (int i = 1; std::filesystem::exists(path, error); ++i) path = absl::StrCat(stem, ".", i);
  PARVL_ASSIGN_OR_RETURN(std::unique_ptr<FileWriter> file, FileWriter::create(path));
  auto writer = std::unique_ptr<EventWriter>(new EventWriter(std::move(path), std::move(file)));
  // Event: 3 file_version.
  PARVL_RETURN_IF_ERROR(writer->record(event_head(wall_seconds, 0) + bytes_field(3, "brain.Event:2")));
  return writer;
}

absl::Status EventWriter::scalars(int64_t step, double wall_seconds,
                                  const std::vector<std::pair<std::string, double>>& values) {
  // Event: 5 summary; Summary: 1 value (repeated); Value: 1 tag, 2 simple_value (float).
  std::string summary;
  for (const auto& [tag, value] : values) {
    summary += bytes_field(1, bytes_field(1, tag) + key(2, kFixed32) + raw(static_cast<float>(value)));
  }
  return record(event_head(wall_seconds, step) + bytes_field(5, summary));
}

absl::Status EventWriter::record(std::string_view event) {
  if (!broken_.ok()) return broken_;
  const std::string length = raw(static_cast<uint64_t>(event.size()));
  const std::string whole = length + raw(masked_crc(length)) + std::string(event) + raw(masked_crc(event));
  broken_ = file_->append(whole.data(), whole.size());  // one write
  return broken_;
}

}  // namespace parvl
