#include "parvl/serve/openai_fields.h"

#include <limits>

namespace parvl {
namespace {

constexpr size_t kMaxValues = 1'000'000;  // of one request's JSON; each costs far more memory than its text

// An upper bound on the number of values in a JSON text.
size_t count_values(std::string_view text) {
  size_t count = 1;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
    } else {
      if (c == '"') in_string = true;
      if (c == ',' || c == '[' || c == '{') ++count;
    }
  }
  return count;
}

}  // namespace

absl::StatusOr<Json> parse_body(std::string_view text, const std::string& needs) {
  if (count_values(text) > kMaxValues) {
    return api_error(400,
                     absl::StrCat("the body holds more than ", kMaxValues, " JSON values, the limit of a request"));
  }
  if (text.find_first_not_of(" \t\r\n") == std::string_view::npos) {
    return api_error(400, absl::StrCat("the body is empty; send a JSON object with `", needs, "`"));
  }
  PARVL_ASSIGN_OR_RETURN(Json body, parse_json(text, "the body"));
  if (!body.is_object()) return api_error(400, absl::StrCat("the body must be a JSON object, found ", shown(body)));
  return body;
}

absl::Status wrong_type(const std::string& field, const std::string& wanted, const Json& value) {
  return api_error(400, absl::StrCat("'", field, "' must be ", wanted, ", found ", shown(value)), "", field);
}

absl::Status unavailable(const std::string& field, const std::string& what) {
  return api_error(400, absl::StrCat("'", field, "': ", what, " not available yet"), "not_available_yet", field);
}

const Json* find_field(const Json& object, const char* field) {
  const auto it = object.find(field);
  return it == object.end() || it->is_null() ? nullptr : &*it;
}

absl::Status read_count(const Json& body, const char* field, int64_t low, int64_t high, int64_t& out) {
  PARVL_RETURN_IF_ERROR(read_field(body, field, out));
  if (out >= low && out <= high) return absl::OkStatus();
  return api_error(400, absl::StrCat(field, " must be between ", low, " and ", high, ", found ", out), "", field);
}

absl::Status read_token_ids(const Json& list, const char* field, std::vector<TokenId>& out) {
  constexpr char kWanted[] = "a list of token ids (whole numbers)";
  if (!list.is_array()) return wrong_type(field, kWanted, list);
  for (const Json& value : list) {
    if (!value.is_number_integer()) return wrong_type(field, kWanted, value);
    const bool fits = value.is_number_unsigned()
                          ? value.get<uint64_t>() <= static_cast<uint64_t>(std::numeric_limits<TokenId>::max())
                          : value.get<int64_t>() >= std::numeric_limits<TokenId>::min();
    if (!fits) return api_error(400, absl::StrCat("'", field, "' names a token id that is out of range"), "", field);
    out.push_back(value.get<TokenId>());
  }
  return absl::OkStatus();
}

absl::Status read_model_tokens(const Json& list, const char* field, int64_t vocab_size, std::vector<TokenId>& out) {
  PARVL_RETURN_IF_ERROR(read_token_ids(list, field, out));
  for (const TokenId id : out) {
    if (id >= 0 && id < vocab_size) continue;
    return api_error(
        400,
        absl::StrCat("'", field, "' names token ", id, ", but token ids of this model run from 0 to ", vocab_size - 1),
        "", field);
  }
  return absl::OkStatus();
}

}  // namespace parvl
