// YAML configuration whose every value remembers where it was written, read through checked getters.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "parvl/base/status.h"

namespace parvl {

struct ConfigLimits {
  size_t max_bytes = 1u << 20;
  int max_depth = 32;
  size_t max_nodes = 100'000;
};

struct ConfigEntry;

// A parsed value. Plain data; copying is deep.
struct ConfigNode {
  enum class Kind { kNull, kScalar, kList, kMap };
  Kind kind = Kind::kNull;
  std::string text;                           // kScalar
  bool quoted = false;                        // kScalar: written in quotes, so it is text whatever it looks like
  std::vector<ConfigNode> items;              // kList
  std::vector<ConfigEntry> entries;           // kMap, in the order written
  std::shared_ptr<const std::string> source;  // a file's name, or "--set key=value"
  int line = 0;                               // from 1; 0 in an override

  std::string place() const;  // "recipe.yaml:12" or "--set key=value"
  const ConfigEntry* find(std::string_view key) const;
};

struct ConfigEntry {
  std::string key;
  ConfigNode key_place;  // kind kNull: only source and line
  ConfigNode value;
};

// Parses one YAML document; its root must be a map. Refused: anchors and aliases (no file here needs them, and they can
// expand without bound), tags, duplicate keys, several documents, and what is over a limit. `name` is what errors call
// it.
absl::StatusOr<ConfigNode> parse_config(std::string_view text, const std::string& name,
                                        const ConfigLimits& limits = {});

// Reads FILE and applies overrides `dotted.key=YAML value` in order. An override creates the sections it passes
// through; a number in the path is an index into a list that exists.
absl::StatusOr<ConfigNode> load_config(const std::string& path, const std::vector<std::string>& overrides,
                                       const ConfigLimits& limits = {});
absl::Status apply_override(ConfigNode& root, const std::string& override_text, const ConfigLimits& limits = {});

// A range of numbers for a check and its message.
struct NumberRange {
  double low = -std::numeric_limits<double>::infinity();
  double high = std::numeric_limits<double>::infinity();
  bool low_open = false;   // low itself is not allowed
  bool high_open = false;  // high itself is not allowed
  bool contains(double value) const;
  std::string text() const;  // "of at least 0", "in [0, 1)", ...
};

// Reads one section (a map). Each getter leaves `out` as it was when the key is absent or null, and checks type and
// range; the first error is kept. finish() returns it, or first of all the first key that no getter asked for:
//
//   ConfigReader data = root.section("data");
//   data.integer("micro_batch", out.micro_batch, 1, 1 << 20);
//   PARVL_RETURN_IF_ERROR(data.finish());
//
// Borrows the node. Not thread-safe.
class ConfigReader {
 public:
  explicit ConfigReader(const ConfigNode& section, std::string path = "");

  bool has(const std::string& key);  // present and not null
  ConfigNode::Kind kind(const std::string& key);
  void boolean(const std::string& key, bool& out);
  void integer(const std::string& key, int64_t& out, int64_t low, int64_t high = std::numeric_limits<int64_t>::max());
  void natural(const std::string& key, uint64_t& out);  // 0 .. 2^64 - 1
  void number(const std::string& key, double& out, const NumberRange& range = {});
  void text(const std::string& key, std::string& out);
  void choice(const std::string& key, std::string& out, const std::vector<std::string>& choices);
  void text_list(const std::string& key, std::vector<std::string>& out);
  void integer_list(const std::string& key, std::vector<int64_t>& out, int64_t low);
  void number_list(const std::string& key, std::vector<double>& out, const NumberRange& range = {});

  // The section, list of sections, or named sections under `key`; empty when it is absent. Each is finished by itself.
  ConfigReader section(const std::string& key);
  std::vector<ConfigReader> section_list(const std::string& key);
  std::vector<std::pair<std::string, ConfigReader>> named_sections(const std::string& key);

  void require(const std::string& key, const std::string& what);  // absent: an error that says `what` belongs there
  void fail(const std::string& key,
            const std::string& message);  // an error at that key: "file:line: 'path.key' message"
  // "file:line: 'path.key'"; the section's own place when the key is absent.
  std::string where(const std::string& key) const;
  absl::Status finish() const;

 private:
  const ConfigNode* value(const std::string& key);  // nullptr when absent or null; remembers that the key is known
  const ConfigNode* scalar(const std::string& key, const std::string& wanted);
  void fail_at(const ConfigNode& place, const std::string& key, const std::string& message);
  std::string full(const std::string& key) const;

  const ConfigNode* section_;
  std::shared_ptr<const ConfigNode> owned_;  // keeps an absent section's stand-in
  std::string path_;
  std::vector<std::string> known_;
  absl::Status first_error_;
};

}  // namespace parvl
