#include "parvl/base/env.h"

#include <cstdlib>

namespace parvl {

std::string get_env(const std::string& name, const std::string& fallback) {
  const char* value = std::getenv(name.c_str());
  return value == nullptr ? fallback : value;
}

}  // namespace parvl
