#include "parvl/serve/bearer_keys.h"

#include <absl/strings/match.h>
#include <openssl/crypto.h>

#include "parvl/base/file.h"

namespace parvl {
namespace {

constexpr std::string_view kBearer = "Bearer ";

}  // namespace

BearerKeys::BearerKeys(const std::vector<std::string>& keys) {
  for (const std::string& key : keys) hashes_.push_back(sha256_hex(key));
}

bool BearerKeys::is_bearer(std::string_view header) {
  return header.size() > kBearer.size() &&
         absl::EqualsIgnoreCase(std::string(header.substr(0, kBearer.size())), std::string(kBearer));
}

// Hashes have one length, and each is compared whole.
std::optional<size_t> BearerKeys::find(std::string_view header) const {
  const bool bearer = is_bearer(header);
  const std::string hash = sha256_hex(bearer ? header.substr(kBearer.size()) : std::string_view());
  std::optional<size_t> found;
  for (size_t i = 0; i < hashes_.size(); ++i) {
    if (CRYPTO_memcmp(hash.data(), hashes_[i].data(), hash.size()) == 0) found = i;
  }
  return bearer ? found : std::nullopt;
}

}  // namespace parvl
