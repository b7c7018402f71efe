// JSON schemas that an answer can be held to: which keywords are understood, and what each is taken to mean.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "parvl/base/ordered_json.h"
#include "parvl/base/status.h"

namespace parvl {

struct SchemaLimits {
  static constexpr size_t kMaxBytes = 128u << 10;      // of a schema, pattern or list of choices; of all of one request
  static constexpr int64_t kMaxDepth = 24;             // schemas in one another
  static constexpr size_t kMaxCountedProperties = 32;  // beside minProperties or maxProperties
  static constexpr int64_t kMaxRepeat = 4096;          // minItems, maxLength and the like, and {n,m} of a pattern
  static constexpr size_t kMaxPatternBytes = 4u << 10;  // its automaton may take the square of it
  static constexpr size_t kMaxPointerBytes = 1024;      // the names on the way to one schema, as a JSON pointer
};

// The schema as the grammar compiler reads it, whose answers are all valid under the given one (there may be valid
// answers that it leaves out: objects have only the keys that `properties` describes, in that order, unless the schema
// says otherwise; a pattern is matched from the beginning to the end). InvalidArgument in one sentence for what cannot
// be kept to: a keyword that is not understood is refused by name, never left out. `where` is what the message calls
// the schema.
absl::StatusOr<OrderedJson> supported_schema(const OrderedJson& schema, const std::string& where);

// Whether `supported` (supported_schema's) says that its values are objects: by its type, or by that of the schema that
// its $ref leads to.
bool describes_object(const OrderedJson& supported);

// The schemas in a supported one and itself, inner ones first, with their JSON pointers; without those that need what a
// $ref names outside of them. They live as long as `supported`.
std::vector<std::pair<std::string, const OrderedJson*>> inner_schemas(const OrderedJson& supported);

// That a pattern repeats nothing more often than kMaxRepeat and is no longer than kMaxPatternBytes. InvalidArgument
// naming `where`.
absl::Status check_pattern(std::string_view pattern, const std::string& where);

// That what is called `where` has at most `limit` bytes. InvalidArgument naming all three.
absl::Status check_grammar_bytes(size_t bytes, const std::string& where, size_t limit = SchemaLimits::kMaxBytes);

}  // namespace parvl
