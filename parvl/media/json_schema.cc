#include "parvl/media/json_schema.h"

#include <absl/container/flat_hash_set.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string_view>
#include <utility>
#include <vector>

#include "parvl/base/text.h"
#include "parvl/media/json_values.h"

namespace parvl {
namespace {

// Say nothing about what is valid.
constexpr std::string_view kAnnotations[] = {"title",    "description", "default",     "examples",     "example",
                                             "readOnly", "writeOnly",   "deprecated",  "$comment",     "$schema",
                                             "$id",      "$defs",       "definitions", "discriminator"};
// The ways to say what a value is; the first that is there counts.
constexpr std::string_view kForms[] = {"$ref", "const", "enum", "anyOf", "oneOf", "allOf", "type"};
// Whose value is one schema, named ones, or a list of them.
constexpr const char* kOneSchema[] = {"items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems",
                                      "propertyNames"};
constexpr const char* kNamedSchemas[] = {"properties", "patternProperties", "$defs", "definitions"};
constexpr const char* kListedSchemas[] = {"anyOf", "oneOf", "allOf", "prefixItems"};
constexpr std::string_view kObjectWords[] = {
    "properties",    "required",      "additionalProperties", "patternProperties",
    "propertyNames", "minProperties", "maxProperties",        "unevaluatedProperties"};
constexpr std::string_view kArrayWords[] = {"items",    "prefixItems",      "minItems",
                                            "maxItems", "unevaluatedItems", "uniqueItems"};
constexpr std::string_view kStringWords[] = {"minLength", "maxLength", "pattern", "format"};
constexpr const char* kNumberWords[] = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"};
constexpr const char* kCounts[] = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"};
constexpr std::string_view kFormats[] = {"date-time", "date", "time", "duration", "email",        "hostname",
                                         "ipv4",      "ipv6", "uuid", "uri",      "uri-reference"};
constexpr std::string_view kTypes[] = {"string", "integer", "number", "boolean", "null", "array", "object"};

template <typename List>
bool holds(const List& list, std::string_view word) {
  return std::find(std::begin(list), std::end(list), word) != std::end(list);
}

bool is_annotation(std::string_view word) { return holds(kAnnotations, word) || word.starts_with("x-"); }

bool has_type(const OrderedJson& value, std::string_view type) {
  if (type == "integer") return value.is_number_integer();
  if (type == "number") return value.is_number();
  return value.type_name() == type;
}

// The types that a schema with `type` allows.
std::vector<std::string> types_of(const OrderedJson& schema) {
  std::vector<std::string> types;
  const OrderedJson& type = schema["type"];
  for (const OrderedJson& one : type.is_array() ? type : OrderedJson::array({type})) types.push_back(one);
  return types;
}

std::string joined(const std::string& pointer, std::string_view word) {
  std::string out = pointer + "/";
  for (const char c : word) out += c == '~' ? "~0" : c == '/' ? "~1" : std::string(1, c);
  return out;
}

class SchemaReader {
 public:
  explicit SchemaReader(std::string where) : where_(std::move(where)) {}

  absl::StatusOr<OrderedJson> read(const OrderedJson& schema) {
    OrderedJson out = schema;
    PARVL_RETURN_IF_ERROR(visit(out, "", 0));
    for (const auto& [pointer, target] : references_) {
      if (visited_.contains(target)) continue;
      return wrong(pointer, absl::StrCat("$ref ", excerpt("#" + target), " names no schema inside this one"));
    }
    return out;
  }

 private:
  absl::Status wrong(const std::string& pointer, const std::string& message) const {
    return invalid(where_, pointer.empty() ? "" : absl::StrCat(" at ", excerpt("#" + pointer, 120)), ": ", message);
  }

  absl::Status visit(OrderedJson& schema, const std::string& pointer, int64_t depth) {
    if (depth > SchemaLimits::kMaxDepth) {
      return wrong("", absl::StrCat("schemas are nested deeper than the limit of ", SchemaLimits::kMaxDepth,
                                    "; use $defs and $ref, or a flatter schema"));
    }
    if (pointer.size() > SchemaLimits::kMaxPointerBytes) {
      return wrong(pointer, absl::StrCat("the names on the way to this schema have more than ",
                                         SchemaLimits::kMaxPointerBytes, " bytes together; use shorter ones"));
    }
    visited_.insert(pointer);
    if (schema.is_boolean()) {
      if (!schema.get<bool>()) return wrong(pointer, "false allows no value at all; leave it out");
      schema = OrderedJson::object();
      return absl::OkStatus();
    }
    if (!schema.is_object()) {
      return wrong(pointer, absl::StrCat("a schema must be an object, found ", schema.type_name()));
    }
    PARVL_RETURN_IF_ERROR(check_words(schema, pointer));
    PARVL_RETURN_IF_ERROR(visit_parts(schema, pointer, depth));
    if (schema.contains("type")) PARVL_RETURN_IF_ERROR(check_typed(schema, pointer));
    return absl::OkStatus();
  }

  // Every keyword is one that is understood where it stands.
  absl::Status check_words(OrderedJson& schema, const std::string& pointer) {
    PARVL_RETURN_IF_ERROR(add_type(schema, pointer));
    const auto form = std::find_if(std::begin(kForms), std::end(kForms),
                                   [&](std::string_view word) { return schema.contains(std::string(word)); });
    const std::string kind = form == std::end(kForms) ? "" : std::string(*form);
    for (const auto& [word, value] : schema.items()) {
      if (word == kind || is_annotation(word)) continue;
      if ((kind == "const" || kind == "enum") && word == "type") continue;
      const bool typed = holds(kObjectWords, word) || holds(kArrayWords, word) || holds(kStringWords, word) ||
                         holds(kNumberWords, word);
      if (kind == "type" && typed) continue;
      if (typed || holds(kForms, word)) {
        return wrong(pointer, absl::StrCat("'", word, "' beside '", kind, "' is not supported; merge them into one"));
      }
      return wrong(pointer, absl::StrCat("the keyword ", excerpt(word), " is not supported; remove it"));
    }
    if (kind == "$ref") return note_reference(schema, pointer);
    if (kind == "const" || kind == "enum") return check_values(schema, kind, pointer);
    return absl::OkStatus();
  }

  // Keywords for objects or arrays alone say which of the two is meant.
  absl::Status add_type(OrderedJson& schema, const std::string& pointer) {
    if (std::any_of(std::begin(kForms), std::end(kForms),
                    [&](std::string_view word) { return schema.contains(std::string(word)); })) {
      return schema.contains("type") ? check_type(schema["type"], pointer) : absl::OkStatus();
    }
    for (const auto& [word, value] : schema.items()) {
      if (holds(kObjectWords, word) || holds(kArrayWords, word)) {
        const bool object = holds(kObjectWords, word);
        schema["type"] = object ? "object" : "array";
        return absl::OkStatus();
      }
      if (holds(kStringWords, word) || holds(kNumberWords, word)) {
        return wrong(pointer, absl::StrCat("'", word, "' needs a 'type' beside it; add one"));
      }
    }
    return absl::OkStatus();
  }

  absl::Status check_type(const OrderedJson& type, const std::string& pointer) {
    const OrderedJson list = type.is_array() ? type : OrderedJson::array({type});
    if (list.empty()) return wrong(pointer, "'type' names no type");
    for (const OrderedJson& one : list) {
      if (one.is_string() && holds(kTypes, one.get_ref<const std::string&>())) continue;
      return wrong(pointer, absl::StrCat("'type' must be string, integer, number, boolean, null, array or object, or a "
                                         "list of these, found ",
                                         excerpt(one.is_string() ? one.get<std::string>() : one.type_name())));
    }
    return absl::OkStatus();
  }

  absl::Status note_reference(const OrderedJson& schema, const std::string& pointer) {
    const OrderedJson& reference = schema["$ref"];
    const std::string text = reference.is_string() ? reference.get<std::string>() : "";
    if (!text.starts_with("#") || (text.size() > 1 && text[1] != '/')) {
      return wrong(pointer, "'$ref' must be '#' or begin with '#/'; only references inside the schema are followed");
    }
    references_.emplace_back(pointer, percent_decode(text.substr(1)));
    return absl::OkStatus();
  }

  absl::Status check_values(const OrderedJson& schema, const std::string& kind, const std::string& pointer) {
    const OrderedJson& values = schema[kind];
    if (kind == "enum" && (!values.is_array() || values.empty())) {
      return wrong(pointer, "'enum' must be a list of at least one value");
    }
    if (!schema.contains("type")) return absl::OkStatus();
    const std::vector<std::string> types = types_of(schema);
    for (const OrderedJson& value : kind == "enum" ? values : OrderedJson::array({values})) {
      const auto allows = [&](const std::string& type) { return has_type(value, type); };
      if (std::any_of(types.begin(), types.end(), allows)) continue;
      return wrong(pointer, absl::StrCat("'", kind, "' holds a value (", value.type_name(),
                                         ") that 'type' does not allow; remove it"));
    }
    return absl::OkStatus();
  }

  // The schemas inside this one.
  absl::Status visit_parts(OrderedJson& schema, const std::string& pointer, int64_t depth) {
    for (const char* word : kNamedSchemas) {
      const auto part = schema.find(word);
      if (part == schema.end()) continue;
      if (!part->is_object()) return wrong(pointer, absl::StrCat("'", word, "' must be an object"));
      for (auto& [key, inner] : part->items()) {
        PARVL_RETURN_IF_ERROR(visit(inner, joined(joined(pointer, word), key), depth + 1));
      }
    }
    for (const char* word : kListedSchemas) {
      const auto part = schema.find(word);
      if (part == schema.end()) continue;
      if (!part->is_array() || part->empty()) {
        return wrong(pointer, absl::StrCat("'", word, "' must be a list of at least one schema"));
      }
      for (size_t i = 0; i < part->size(); ++i) {
        PARVL_RETURN_IF_ERROR(visit((*part)[i], joined(joined(pointer, word), absl::StrCat(i)), depth + 1));
      }
      if (std::string_view(word) == "allOf" && part->size() > 1) {
        return wrong(pointer, "'allOf' of more than one schema is not supported; merge them into one");
      }
    }
    if (const auto names = schema.find("propertyNames");
        names != schema.end() && names->is_object() && !names->contains("type")) {
      (*names)["type"] = "string";
    }
    for (const char* word : kOneSchema) {
      const auto part = schema.find(word);
      if (part == schema.end() || (part->is_boolean() && std::string_view(word) != "propertyNames")) continue;
      PARVL_RETURN_IF_ERROR(visit(*part, joined(pointer, word), depth + 1));
    }
    return absl::OkStatus();
  }

  absl::Status check_typed(OrderedJson& schema, const std::string& pointer) {
    const std::vector<std::string> types = types_of(schema);
    for (const std::string word : kCounts) {
      const auto count = schema.find(word);
      if (count == schema.end()) continue;
      const double number = count->is_number() ? count->get<double>() : -1;
      const bool within = number >= 0 && number <= SchemaLimits::kMaxRepeat;  // before it becomes an integer
      if (within && count->is_number_float() && std::trunc(number) == number) *count = static_cast<int64_t>(number);
      if (!within || !count->is_number_integer()) {
        return wrong(pointer, absl::StrCat("'", word, "' must be a whole number from 0 to ", SchemaLimits::kMaxRepeat,
                                           ", found ", shown(Json(*count))));
      }
    }
    if (holds(types, "string")) PARVL_RETURN_IF_ERROR(check_string(schema, pointer));
    if (holds(types, "number") || holds(types, "integer")) PARVL_RETURN_IF_ERROR(check_number(schema, pointer));
    if (holds(types, "array")) PARVL_RETURN_IF_ERROR(check_array(schema, pointer));
    if (holds(types, "object")) PARVL_RETURN_IF_ERROR(check_object(schema, pointer));
    return absl::OkStatus();
  }

  absl::Status check_string(OrderedJson& schema, const std::string& pointer) {
    for (const char* word : {"format", "pattern"}) {
      if (schema.contains(word) && !schema[word].is_string()) {
        return wrong(pointer, absl::StrCat("'", word, "' must be a string"));
      }
    }
    const bool format = schema.contains("format"), pattern = schema.contains("pattern");
    const bool length = schema.contains("minLength") || schema.contains("maxLength");
    if (format + pattern + length > 1) {
      return wrong(pointer,
                   "of 'format', 'pattern' and 'minLength'/'maxLength' only one can be kept to; remove others");
    }
    if (format && !holds(kFormats, schema["format"].get_ref<const std::string&>())) {
      return wrong(pointer, absl::StrCat("the format ", excerpt(schema["format"].get<std::string>()),
                                         " is not supported; date-time, date, time, duration, email, hostname, ipv4, "
                                         "ipv6, uuid, uri and uri-reference are"));
    }
    if (const std::string exact = format ? exact_pattern(schema["format"].get<std::string>()) : ""; !exact.empty()) {
      schema.erase("format");
      schema["pattern"] = exact;
    }
    if (!pattern) return absl::OkStatus();
    return check_pattern(
        schema["pattern"].get_ref<const std::string&>(),
        absl::StrCat(where_, pointer.empty() ? "" : " at " + excerpt("#" + pointer, 120), ": 'pattern'"));
  }

  absl::Status check_number(const OrderedJson& schema, const std::string& pointer) {
    for (const std::string word : kNumberWords) {
      const auto bound = schema.find(word);
      if (bound != schema.end() && !bound->is_number()) {
        return wrong(pointer, absl::StrCat("'", word, "' must be a number, found ", bound->type_name()));
      }
    }
    const absl::Status range = check_range(schema, !holds(types_of(schema), "number"));
    return range.ok() ? range : wrong(pointer, std::string(range.message()));
  }

  absl::Status check_array(OrderedJson& schema, const std::string& pointer) {
    if (const auto unique = schema.find("uniqueItems"); unique != schema.end()) {
      if (*unique != false) return wrong(pointer, "'uniqueItems' cannot be kept to; remove it");
      schema.erase("uniqueItems");
    }
    const bool described = schema.contains("items") || schema.contains("unevaluatedItems");
    if (!described && !schema.contains("prefixItems")) schema["items"] = OrderedJson::object();
    return absl::OkStatus();
  }

  absl::Status check_object(OrderedJson& schema, const std::string& pointer) {
    const bool properties = schema.contains("properties"), patterns = schema.contains("patternProperties");
    const bool says = schema.contains("additionalProperties") || schema.contains("unevaluatedProperties");
    if (!properties && !patterns && !says) schema["additionalProperties"] = true;
    const bool more = is_open(schema, "additionalProperties") || is_open(schema, "unevaluatedProperties");
    if (patterns && (properties || more)) {
      return wrong(pointer, "'patternProperties' beside 'properties' or further properties is not supported; use one");
    }
    if (schema.contains("propertyNames") && (properties || patterns)) {
      return wrong(pointer, "'propertyNames' beside described properties is not supported; use one of them");
    }
    if ((more || patterns) && schema.contains("minProperties")) {
      return wrong(pointer, "'minProperties' is only supported where 'properties' describes all of them; remove it");
    }
    if (properties && (schema.contains("minProperties") || schema.contains("maxProperties")) &&
        schema["properties"].size() > SchemaLimits::kMaxCountedProperties) {
      return wrong(pointer, absl::StrCat("'minProperties' and 'maxProperties' beside more than ",
                                         SchemaLimits::kMaxCountedProperties, " properties are not supported"));
    }
    if (properties && more) {
      for (const auto& [key, inner] : schema["properties"].items()) {
        const auto odd = [](char c) { return c < 0x20 || c > 0x7e || c == '"' || c == '\\'; };
        if (std::none_of(key.begin(), key.end(), odd)) continue;
        return wrong(pointer, absl::StrCat("with the property ", excerpt(key),
                                           " further properties are not supported; set 'additionalProperties' to "
                                           "false"));
      }
    }
    const auto required = schema.find("required");
    if (required == schema.end()) return absl::OkStatus();
    if (!required->is_array()) return wrong(pointer, "'required' must be a list of property names");
    for (const OrderedJson& name : *required) {
      if (name.is_string() && properties && schema["properties"].contains(name.get<std::string>())) continue;
      return wrong(pointer, absl::StrCat("'required' names ", excerpt(name.is_string() ? name.get<std::string>() : "?"),
                                         ", which 'properties' does not describe; describe it there"));
    }
    return absl::OkStatus();
  }

  static bool is_open(const OrderedJson& schema, const char* word) {
    const auto found = schema.find(word);
    return found != schema.end() && *found != false;
  }

  const std::string where_;
  absl::flat_hash_set<std::string> visited_;                     // JSON pointers of schemas
  std::vector<std::pair<std::string, std::string>> references_;  // from, to
};

}  // namespace

absl::StatusOr<OrderedJson> supported_schema(const OrderedJson& schema, const std::string& where) {
  const size_t bytes = schema.dump(-1, ' ', false, OrderedJson::error_handler_t::replace).size();
  PARVL_RETURN_IF_ERROR(check_grammar_bytes(bytes, where));
  return SchemaReader(where).read(schema);
}

std::vector<std::pair<std::string, const OrderedJson*>> inner_schemas(const OrderedJson& supported) {
  std::vector<std::pair<std::string, const OrderedJson*>> out;
  // Whether no reference leads out of `schema`.
  const std::function<bool(const OrderedJson&, const std::string&)> add = [&](const OrderedJson& schema,
                                                                              const std::string& pointer) {
    bool alone = !schema.contains("$ref");
    for (const auto& [word, value] : schema.items()) {
      const std::string place = joined(pointer, word);
      if (holds(kOneSchema, word) && value.is_object()) alone &= add(value, place);
      if (!holds(kNamedSchemas, word) && !holds(kListedSchemas, word)) continue;
      for (const auto& [name, inner] : value.items()) {
        if (inner.is_object()) alone &= add(inner, joined(place, name));
      }
    }
    if (alone) out.emplace_back(pointer, &schema);
    return alone;
  };
  add(supported, "");
  return out;
}

bool describes_object(const OrderedJson& supported) {
  const OrderedJson* schema = &supported;
  for (int64_t hop = 0; hop <= SchemaLimits::kMaxDepth; ++hop) {  // references may go in a circle
    const auto reference = schema->find("$ref");
    if (reference == schema->end()) {
      const auto type = schema->find("type");
      return type != schema->end() && *type == "object";
    }
    const OrderedJson::json_pointer target(percent_decode(reference->get<std::string>().substr(1)));
    schema = &supported.at(target);  // which is a schema, as supported_schema saw to
  }
  return false;
}

}  // namespace parvl
