// Errors as a client sees them: an absl::Status carries the HTTP status, the `param` and the `code` as payloads.
#pragma once

#include <string>
#include <string_view>

#include "parvl/base/json.h"
#include "parvl/base/status.h"

namespace parvl {

// A status that answers with `http_status`. `code` is the short machine-readable name, `field` the request field at
// fault.
absl::Status api_error(int http_status, const std::string& message, const std::string& code = "",
                       const std::string& field = "");
// The same status with `field` as its `param`, unless it names one already.
absl::Status with_field(absl::Status status, const std::string& field);

// What an engine says, in an answer's stead or in its stream: Unavailable, nothing to run on, has the code
// no_healthy_instance.
absl::Status engine_error(absl::Status status);

// Statuses of other origin: InvalidArgument, OutOfRange, Unimplemented → 400; NotFound → 404; Unavailable → 503; others
// 500.
int http_status_of(const absl::Status& status);

// {"error": {"message", "type", "param", "code"}}, the message at most 1,000 characters.
std::string error_body(const absl::Status& status);

// JSON text; bytes that are not UTF-8 become U+FFFD.
std::string dump_json(const Json& json);

// At most `max_bytes` of `text`, cut between characters.
std::string shorten(std::string_view text, size_t max_bytes);

}  // namespace parvl
