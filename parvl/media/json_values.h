// What a schema's words for strings and numbers come to, where the grammar library's own reading only comes near.
#pragma once

#include <string>
#include <string_view>

#include "parvl/base/ordered_json.h"
#include "parvl/base/status.h"

namespace parvl {

// The pattern of a format that has one here, or "": days that months have, octets without leading zeros.
std::string exact_pattern(std::string_view format);

// InvalidArgument when the bounds of `schema` leave no number: of whole ones (which are held to ±2^53), or of those
// that are written, with at most six decimals. The bounds are numbers.
absl::Status check_range(const OrderedJson& schema, bool whole);

}  // namespace parvl
