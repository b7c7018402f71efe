// Numbers and strings as bytes, little-endian, and back without believing them.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

namespace parvl {

class ByteWriter {
 public:
  template <typename T>
  void number(T value) {
    static_assert(std::is_integral_v<T> && std::endian::native == std::endian::little);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  // At most 65,535 bytes; the rest is cut off.
  void text(std::string_view value) {
    value = value.substr(0, 0xffff);
    number(static_cast<uint16_t>(value.size()));
    bytes_.append(value);
  }
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

// Once something did not fit, everything after it is zero or empty, and ok() false.
class ByteReader {
 public:
  explicit ByteReader(std::string_view bytes) : rest_(bytes) {}
  template <typename T>
  T number() {
    T value{};
    const std::string_view bytes = take(sizeof value);
    if (ok_) std::memcpy(&value, bytes.data(), sizeof value);
    return value;
  }
  std::string text(size_t most) {
    const size_t size = number<uint16_t>();
    if (size > most) ok_ = false;
    return std::string(take(size));
  }
  bool ok() const { return ok_; }
  bool ends_well() const { return ok_ && rest_.empty(); }

 private:
  std::string_view take(size_t size) {
    if (!ok_ || size > rest_.size()) {
      ok_ = false;
      return {};
    }
    const std::string_view out = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return out;
  }
  std::string_view rest_;
  bool ok_ = true;
};

}  // namespace parvl
