#include "parvl/base/status.h"

#include <new>

namespace parvl {

int exit_code(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return 0;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kUnimplemented:
      return 2;
    default:
      return 1;
  }
}

absl::Status catch_exceptions(const std::string& what, const std::function<absl::Status()>& body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError(what + ": out of memory");
  } catch (const std::exception& e) {
    // libtorch appends a C++ backtrace to its messages; the first line is the cause.
    std::string text = e.what();
    return absl::InternalError(what + ": " + text.substr(0, text.find('\n')));
  }
}

}  // namespace parvl
