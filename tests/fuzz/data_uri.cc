// data: URIs, as anyone may write them, against a plain decoder: it forgives the same things (line breaks, the URL-safe
// alphabet, missing padding, percent escapes), and otherwise both refuse. What is refused is explained.
#include <algorithm>
#include <optional>
#include <string_view>

#include "parvl/serve/api_error.h"
#include "parvl/serve/media_source.h"
#include "tests/fuzz/fuzz.h"

std::vector<std::string> fuzz_seeds() {
  return {"data:image/png;base64,iVBORw0KGgo=",
          "DATA:image/png;charset=x;BASE64,iVBORw0KGgo",
          "data:;base64,aGVs\r\nbG8g\n d29y\tbGQh",
          "data:;base64,-_-_+/+/",
          "data:;base64,aGk%3D",
          "data:;base64,aGk%3d%0A",
          "data:;base64,aGk==",
          "data:;base64,aG=k",
          "data:;base64,a",
          "data:;base64,a?b=",
          "data:;base64,",
          "data:,plain%20text%",
          "data:text/plain,100%zz",
          "data:no comma"};
}

namespace {

constexpr size_t kMaxBytes = 200;

int hex_digit(char c) {
  const std::string_view lower = "0123456789abcdef", upper = "0123456789ABCDEF";
  const size_t at = std::min(lower.find(c), upper.find(c));
  return at == std::string_view::npos ? -1 : static_cast<int>(at);
}

// "%41" is "A"; a percent sign without two digits stays.
std::string without_escapes(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool whole = text[i] == '%' && i + 2 < text.size();
    const int high = whole ? hex_digit(text[i + 1]) : -1, low = whole ? hex_digit(text[i + 2]) : -1;
    if (high < 0 || low < 0) {
      out += text[i];
      continue;
    }
    out += static_cast<char>(high * 16 + low);
    i += 2;
  }
  return out;
}

// Bit by bit, from the definition: six bits a digit, eight bits a byte.
std::optional<std::string> plain_base64(const std::string& text) {
  const std::string alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::vector<bool> bits;
  std::string digits = text;
  std::erase_if(digits, [](char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; });
  const size_t end = digits.find('=');
  if (end != std::string::npos) {
    const std::string padding = digits.substr(end);
    if (padding != "=" && padding != "==") return std::nullopt;
    digits.resize(end);
  }
  if (digits.size() % 4 == 1) return std::nullopt;
  for (char c : digits) {
    if (c == '-') c = '+';
    if (c == '_') c = '/';
    const size_t value = alphabet.find(c);
    if (value == std::string::npos || c == '\0') return std::nullopt;
    for (int bit = 5; bit >= 0; --bit) bits.push_back(value >> bit & 1);
  }
  std::string out;
  for (size_t i = 0; i + 8 <= bits.size(); i += 8) {
    int byte = 0;
    for (size_t bit = 0; bit < 8; ++bit) byte = byte * 2 + bits[i + bit];
    out += static_cast<char>(byte);
  }
  return out;
}

// What a data: URI's bytes are; nullopt: it is none, or holds none.
std::optional<std::string> plain_decode(std::string_view rest) {
  const size_t comma = rest.find(',');
  if (comma == std::string_view::npos || comma > 1024) return std::nullopt;
  std::string header(rest.substr(0, comma));
  std::transform(header.begin(), header.end(), header.begin(),
                 [](unsigned char c) { return static_cast<char>(c >= 'A' && c <= 'Z' ? c + 32 : c); });
  const std::string data = without_escapes(rest.substr(comma + 1));
  std::optional<std::string> bytes = header.ends_with(";base64") ? plain_base64(data) : data;
  if (bytes.has_value() && bytes->empty()) return std::nullopt;
  return bytes;
}

void require_same(const std::string& uri, const parvl::MediaPolicy& policy, parvl::MediaFetcher& fetcher) {
  const auto ours = parvl::load_media(uri, policy, "image 1", fetcher);
  const auto plain = plain_decode(std::string_view(uri).substr(5));
  if (ours.ok()) {
    FUZZ_REQUIRE(plain.has_value() && *plain == *ours && ours->size() <= kMaxBytes);
    return;
  }
  const int status = parvl::http_status_of(ours.status());
  const std::string message(ours.status().message());
  require_good_message(message);
  FUZZ_REQUIRE(message.find("image 1") != std::string::npos);
  if (status == 413) {  // too large, perhaps only by what its escapes could have been
    FUZZ_REQUIRE(uri.size() > kMaxBytes);
  } else {
    FUZZ_REQUIRE(status == 422 && !plain.has_value());
  }
}

std::string encoded(const uint8_t* data, size_t size, std::string_view alphabet) {
  std::string out;
  for (size_t i = 0; i < size; i += 3) {
    uint32_t group = 0;
    for (size_t j = 0; j < 3; ++j) group = group << 8 | (i + j < size ? data[i + j] : 0u);
    for (size_t j = 0; j < 4; ++j) {
      out += i + j <= size ? alphabet[group >> (18 - 6 * j) & 63] : '=';
    }
  }
  return out;
}

// Every way to write the same bytes gives them back.
void require_round_trip(const uint8_t* data, size_t size, const parvl::MediaPolicy& policy,
                        parvl::MediaFetcher& fetcher) {
  const std::string standard = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  const std::string url_safe = standard.substr(0, 62) + "-_";
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  for (const std::string& alphabet : {standard, url_safe}) {
    const std::string whole = encoded(data, size, alphabet);
    std::string broken, escaped;
    for (size_t i = 0; i < whole.size(); ++i) {
      broken += whole[i];
      if (i % 7 == 6) broken += i % 2 ? "\r\n" : "\n ";
      escaped += whole[i] == '=' ? "%3D" : whole[i] == '+' ? "%2b" : std::string(1, whole[i]);
    }
    const std::string unpadded = whole.substr(0, whole.find('='));
    for (const std::string& text : {whole, broken, escaped, unpadded}) {
      const auto ours = parvl::load_media("data:image/png;base64," + text, policy, "image 1", fetcher);
      FUZZ_REQUIRE(ours.ok() && *ours == bytes);
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  parvl::MediaPolicy policy;
  policy.image.max_bytes = kMaxBytes;
  parvl::MediaFetcher fetcher(policy);
  const std::string text(reinterpret_cast<const char*>(data), size);
  const bool is_uri = text.size() >= 5 && (text.starts_with("data:") || text.starts_with("DATA:"));
  require_same(is_uri ? text : "data:" + text, policy, fetcher);
  require_same("data:;base64," + text, policy, fetcher);
  if (size > 0 && size <= 100) require_round_trip(data, size, policy, fetcher);
  return 0;
}
