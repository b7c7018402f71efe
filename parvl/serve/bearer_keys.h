// Keys that a client shows as `Authorization: Bearer KEY`.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace parvl {

class BearerKeys {
 public:
  explicit BearerKeys(const std::vector<std::string>& keys);
  bool empty() const { return hashes_.empty(); }
  // Which of the keys the header's value holds. Takes one time, whatever the client sent.
  std::optional<size_t> find(std::string_view header) const;
  static bool is_bearer(std::string_view header);

 private:
  std::vector<std::string> hashes_;
};

}  // namespace parvl
