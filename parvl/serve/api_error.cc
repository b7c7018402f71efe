#include "parvl/serve/api_error.h"

#include <absl/strings/cord.h>
#include <absl/strings/numbers.h>

#include "parvl/exec/sampler.h"

namespace parvl {
namespace {

constexpr char kHttpPayload[] = "parvl.http";
constexpr char kCodePayload[] = "parvl.code";
constexpr size_t kMaxMessage = 1000;

absl::StatusCode status_code_for(int http_status) {
  switch (http_status) {
    case 404:
      return absl::StatusCode::kNotFound;
    case 429:
      return absl::StatusCode::kResourceExhausted;
    case 503:
      return absl::StatusCode::kUnavailable;
    default:
      return http_status >= 500 ? absl::StatusCode::kInternal : absl::StatusCode::kInvalidArgument;
  }
}

const char* error_type(int http_status) {
  switch (http_status) {
    case 401:
      return "authentication_error";
    case 404:
      return "not_found_error";
    case 429:
      return "rate_limit_error";
    default:
      return http_status >= 500 ? "server_error" : "invalid_request_error";
  }
}

Json payload_or_null(const absl::Status& status, const char* name) {
  const auto payload = status.GetPayload(name);
  return payload.has_value() ? Json(std::string(*payload)) : Json(nullptr);
}

}  // namespace

absl::Status api_error(int http_status, const std::string& message, const std::string& code, const std::string& field) {
  absl::Status status(status_code_for(http_status), message);
  status.SetPayload(kHttpPayload, absl::Cord(std::to_string(http_status)));
  if (!code.empty()) status.SetPayload(kCodePayload, absl::Cord(code));
  if (!field.empty()) status.SetPayload(kFieldPayload, absl::Cord(field));
  return status;
}

absl::Status with_field(absl::Status status, const std::string& field) {
  if (!status.ok() && !status.GetPayload(kFieldPayload).has_value()) {
    status.SetPayload(kFieldPayload, absl::Cord(field));
  }
  return status;
}

absl::Status engine_error(absl::Status status) {
  if (!absl::IsUnavailable(status)) return status;
  return api_error(503, std::string(status.message()), "no_healthy_instance");
}

int http_status_of(const absl::Status& status) {
  if (const auto payload = status.GetPayload(kHttpPayload)) {
    int value = 500;
    return absl::SimpleAtoi(std::string(*payload), &value) ? value : 500;
  }
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return 200;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kUnimplemented:
      return 400;
    case absl::StatusCode::kNotFound:
      return 404;
    case absl::StatusCode::kUnavailable:
      return 503;
    default:
      return 500;
  }
}

std::string error_body(const absl::Status& status) {
  const int http_status = http_status_of(status);
  return dump_json({{"error",
                     {{"message", shorten(std::string(status.message()), kMaxMessage)},
                      {"type", error_type(http_status)},
                      {"param", payload_or_null(status, kFieldPayload)},
                      {"code", payload_or_null(status, kCodePayload)}}}});
}

std::string dump_json(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

std::string shorten(std::string_view text, size_t max_bytes) {
  if (text.size() <= max_bytes) return std::string(text);
  size_t end = max_bytes - 3;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
  return std::string(text.substr(0, end)) + "...";
}

}  // namespace parvl
