// Environment variables; only `apps` asks for them and hands values on.
#pragma once

#include <string>

namespace parvl {

// The variable's value, or `fallback` when it is not set.
std::string get_env(const std::string& name, const std::string& fallback = "");

}  // namespace parvl
