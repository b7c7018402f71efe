#include "parvl/base/config.h"

#include <absl/strings/numbers.h>
#include <absl/strings/str_join.h>

#include <algorithm>
#include <cmath>

#include "parvl/base/text.h"

namespace parvl {
namespace {

const char* kind_name(ConfigNode::Kind kind) {
  switch (kind) {
    case ConfigNode::Kind::kNull:
      return "nothing";
    case ConfigNode::Kind::kScalar:
      return "a plain value";
    case ConfigNode::Kind::kList:
      return "a list";
    case ConfigNode::Kind::kMap:
      return "a section";
  }
  return "";
}

std::string describe(const ConfigNode& node) {
  if (node.kind != ConfigNode::Kind::kScalar) return kind_name(node.kind);
  return (node.quoted ? "the text " : "") + excerpt(node.text);
}

std::string integer_range(int64_t low, int64_t high) {
  if (high == std::numeric_limits<int64_t>::max()) {
    return low == std::numeric_limits<int64_t>::min() ? "" : absl::StrCat(" of at least ", low);
  }
  return absl::StrCat(" from ", low, " to ", high);
}

bool read_integer(const ConfigNode& node, int64_t low, int64_t high, int64_t& out) {
  int64_t value = 0;
  if (node.kind != ConfigNode::Kind::kScalar || node.quoted || !absl::SimpleAtoi(node.text, &value)) return false;
  if (value < low || value > high) return false;
  out = value;
  return true;
}

bool read_number(const ConfigNode& node, const NumberRange& range, double& out) {
  double value = 0;
  if (node.kind != ConfigNode::Kind::kScalar || node.quoted || !absl::SimpleAtod(node.text, &value)) return false;
  if (!std::isfinite(value) || !range.contains(value)) return false;
  out = value;
  return true;
}

}  // namespace

std::string ConfigNode::place() const {
  const std::string name = source == nullptr ? "configuration" : *source;
  return line > 0 ? absl::StrCat(name, ":", line) : name;
}

const ConfigEntry* ConfigNode::find(std::string_view key) const {
  for (const ConfigEntry& entry : entries) {
    if (entry.key == key) return &entry;
  }
  return nullptr;
}

bool NumberRange::contains(double value) const {
  return (low_open ? value > low : value >= low) && (high_open ? value < high : value <= high);
}

std::string NumberRange::text() const {
  if (std::isinf(low) && std::isinf(high)) return "";
  if (std::isinf(high)) return absl::StrCat(low_open ? " above " : " of at least ", low);
  return absl::StrCat(" in ", low_open ? "(" : "[", low, ", ", high, high_open ? ")" : "]");
}

ConfigReader::ConfigReader(const ConfigNode& section, std::string path) : section_(&section), path_(std::move(path)) {}

std::string ConfigReader::full(const std::string& key) const { return path_.empty() ? key : path_ + "." + key; }

std::string ConfigReader::where(const std::string& key) const {
  const ConfigEntry* entry = section_->find(key);
  const std::string place = entry == nullptr ? section_->place() : entry->key_place.place();
  return absl::StrCat(place, ": ", excerpt(full(key), 200));
}

void ConfigReader::fail(const std::string& key, const std::string& message) {
  if (first_error_.ok()) first_error_ = invalid(where(key), " ", message);
}

void ConfigReader::fail_at(const ConfigNode& place, const std::string& key, const std::string& message) {
  if (first_error_.ok()) first_error_ = invalid(place.place(), ": ", excerpt(full(key), 200), " ", message);
}

const ConfigNode* ConfigReader::value(const std::string& key) {
  if (std::find(known_.begin(), known_.end(), key) == known_.end()) known_.push_back(key);
  const ConfigEntry* entry = section_->find(key);
  return entry == nullptr || entry->value.kind == ConfigNode::Kind::kNull ? nullptr : &entry->value;
}

const ConfigNode* ConfigReader::scalar(const std::string& key, const std::string& wanted) {
  const ConfigNode* node = value(key);
  if (node != nullptr && node->kind != ConfigNode::Kind::kScalar) {
    fail(key, absl::StrCat("must be ", wanted, ", found ", describe(*node)));
    return nullptr;
  }
  return node;
}

bool ConfigReader::has(const std::string& key) { return value(key) != nullptr; }

ConfigNode::Kind ConfigReader::kind(const std::string& key) {
  const ConfigNode* node = value(key);
  return node == nullptr ? ConfigNode::Kind::kNull : node->kind;
}

void ConfigReader::boolean(const std::string& key, bool& out) {
  const ConfigNode* node = value(key);
  if (node == nullptr) return;
  const bool plain = node->kind == ConfigNode::Kind::kScalar && !node->quoted;
  if (!plain || (node->text != "true" && node->text != "false")) {
    return fail(key, absl::StrCat("must be true or false, found ", describe(*node)));
  }
  out = node->text == "true";
}

void ConfigReader::integer(const std::string& key, int64_t& out, int64_t low, int64_t high) {
  const ConfigNode* node = value(key);
  if (node != nullptr && !read_integer(*node, low, high, out)) {
    fail(key, absl::StrCat("must be a whole number", integer_range(low, high), ", found ", describe(*node)));
  }
}

void ConfigReader::natural(const std::string& key, uint64_t& out) {
  const ConfigNode* node = value(key);
  if (node == nullptr) return;
  uint64_t parsed = 0;
  if (node->kind != ConfigNode::Kind::kScalar || node->quoted || !absl::SimpleAtoi(node->text, &parsed)) {
    return fail(key, absl::StrCat("must be a whole number from 0 to ", std::numeric_limits<uint64_t>::max(), ", found ",
                                  describe(*node)));
  }
  out = parsed;
}

void ConfigReader::number(const std::string& key, double& out, const NumberRange& range) {
  const ConfigNode* node = value(key);
  if (node != nullptr && !read_number(*node, range, out)) {
    fail(key, absl::StrCat("must be a number", range.text(), ", found ", describe(*node)));
  }
}

void ConfigReader::text(const std::string& key, std::string& out) {
  if (const ConfigNode* node = scalar(key, "text")) out = node->text;
}

void ConfigReader::choice(const std::string& key, std::string& out, const std::vector<std::string>& choices) {
  const std::string wanted = "one of " + absl::StrJoin(choices, ", ");
  const ConfigNode* node = scalar(key, wanted);
  if (node == nullptr) return;
  if (std::find(choices.begin(), choices.end(), node->text) == choices.end()) {
    return fail(key, absl::StrCat("must be one of ", absl::StrJoin(closest_first(node->text, choices), ", "),
                                  ", found ", excerpt(node->text)));
  }
  out = node->text;
}

void ConfigReader::text_list(const std::string& key, std::vector<std::string>& out) {
  const ConfigNode* node = value(key);
  if (node == nullptr) return;
  if (node->kind != ConfigNode::Kind::kList) return fail(key, "must be a list, found " + describe(*node));
  std::vector<std::string> read;
  for (const ConfigNode& item : node->items) {
    if (item.kind != ConfigNode::Kind::kScalar)
      return fail_at(item, key, "must list plain text, found " + describe(item));
    read.push_back(item.text);
  }
  out = std::move(read);
}

void ConfigReader::integer_list(const std::string& key, std::vector<int64_t>& out, int64_t low) {
  const ConfigNode* node = value(key);
  if (node == nullptr) return;
  if (node->kind != ConfigNode::Kind::kList) return fail(key, "must be a list, found " + describe(*node));
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  std::vector<int64_t> read(node->items.size());
  for (size_t i = 0; i < read.size(); ++i) {
    if (read_integer(node->items[i], low, kMost, read[i])) continue;
    return fail_at(
        node->items[i], key,
        absl::StrCat("must list whole numbers", integer_range(low, kMost), ", found ", describe(node->items[i])));
  }
  out = std::move(read);
}

void ConfigReader::number_list(const std::string& key, std::vector<double>& out, const NumberRange& range) {
  const ConfigNode* node = value(key);
  if (node == nullptr) return;
  if (node->kind != ConfigNode::Kind::kList) return fail(key, "must be a list, found " + describe(*node));
  std::vector<double> read(node->items.size());
  for (size_t i = 0; i < read.size(); ++i) {
    if (read_number(node->items[i], range, read[i])) continue;
    return fail_at(node->items[i], key,
                   absl::StrCat("must list numbers", range.text(), ", found ", describe(node->items[i])));
  }
  out = std::move(read);
}

ConfigReader ConfigReader::section(const std::string& key) {
  const ConfigNode* node = value(key);
  if (node != nullptr && node->kind == ConfigNode::Kind::kMap) return ConfigReader(*node, full(key));
  // Absent: an empty one, whose own errors (a missing key, say) point at the section it belongs into.
  auto empty = std::make_shared<ConfigNode>();
  empty->source = section_->source;
  empty->line = section_->line;
  ConfigReader reader(*empty, full(key));
  reader.owned_ = std::move(empty);
  if (node != nullptr) {
    reader.first_error_ = invalid(where(key), " must be a section of `key: value`, found ", describe(*node));
  }
  return reader;
}

std::vector<ConfigReader> ConfigReader::section_list(const std::string& key) {
  std::vector<ConfigReader> readers;
  const ConfigNode* node = value(key);
  if (node == nullptr) return readers;
  if (node->kind != ConfigNode::Kind::kList) {
    fail(key, "must be a list of sections, found " + describe(*node));
    return readers;
  }
  for (size_t i = 0; i < node->items.size(); ++i) {
    const ConfigNode& item = node->items[i];
    if (item.kind == ConfigNode::Kind::kMap) {
      readers.emplace_back(item, absl::StrCat(full(key), ".", i));
    } else {
      fail_at(item, key, "must list sections of `key: value`, found " + describe(item));
    }
  }
  return readers;
}

std::vector<std::pair<std::string, ConfigReader>> ConfigReader::named_sections(const std::string& key) {
  std::vector<std::pair<std::string, ConfigReader>> readers;
  const ConfigNode* node = value(key);
  if (node == nullptr) return readers;
  if (node->kind != ConfigNode::Kind::kMap) {
    fail(key, "must be a section of named sections, found " + describe(*node));
    return readers;
  }
  ConfigReader inner(*node, full(key));
  for (const ConfigEntry& entry : node->entries) readers.emplace_back(entry.key, inner.section(entry.key));
  return readers;
}

void ConfigReader::require(const std::string& key, const std::string& what) {
  if (!has(key)) fail(key, "is missing; give it " + what);
}

absl::Status ConfigReader::finish() const {
  for (const ConfigEntry& entry : section_->entries) {
    if (std::find(known_.begin(), known_.end(), entry.key) != known_.end()) continue;
    return invalid(entry.key_place.place(), ": unknown key ", excerpt(full(entry.key), 200),
                   "; valid here: ", absl::StrJoin(closest_first(entry.key, known_), ", "));
  }
  return first_error_;
}

}  // namespace parvl
