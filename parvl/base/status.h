// Errors: absl::Status, one clear sentence each, naming the thing and the fix.
#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/str_cat.h>

#include <exception>
#include <functional>
#include <string>
#include <utility>

namespace parvl {

// A wrong configuration, model file or request; the program exits with 2.
template <typename... Args>
absl::Status invalid(const Args&... args) {
  return absl::InvalidArgumentError(absl::StrCat(args...));
}

// Something that failed while running (disk, network, device); the program exits with 1.
template <typename... Args>
absl::Status failed(const Args&... args) {
  return absl::InternalError(absl::StrCat(args...));
}

// Named in the contract, but not built yet; exit 2 or HTTP 400.
inline absl::Status not_available_yet(const std::string& what) {
  return absl::UnimplementedError(what + " is not available yet");
}

// The same status with `context: ` in front of its message.
inline absl::Status with_context(const absl::Status& status, const std::string& context) {
  if (status.ok()) return status;
  return absl::Status(status.code(), context + ": " + std::string(status.message()));
}

// The program's exit code for a status: 0, 2 (usage, configuration, model file) or 1 (failed while running).
int exit_code(const absl::Status& status);

// Runs `body`, turning any exception that a library throws (libtorch, Boost, yaml-cpp) into a status whose message
// starts with `what`. The named edges of the program (file load, worker step, trainer step, HTTP session) call it;
// nothing else catches.
absl::Status catch_exceptions(const std::string& what, const std::function<absl::Status()>& body);

}  // namespace parvl

#define PARVL_RETURN_IF_ERROR(expr)                \
  do {                                             \
    absl::Status parvl_status_ = (expr);           \
    if (!parvl_status_.ok()) return parvl_status_; \
  } while (false)

#define PARVL_CONCAT_INNER(a, b) a##b
#define PARVL_CONCAT(a, b) PARVL_CONCAT_INNER(a, b)
#define PARVL_ASSIGN_OR_RETURN(lhs, expr) PARVL_ASSIGN_OR_RETURN_IMPL(PARVL_CONCAT(parvl_or_, __LINE__), lhs, expr)
#define PARVL_ASSIGN_OR_RETURN_IMPL(tmp, lhs, expr) \
  auto tmp = (expr);                                \
  if (!tmp.ok()) return tmp.status();               \
  lhs = std::move(tmp).value()
