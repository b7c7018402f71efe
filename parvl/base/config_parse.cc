// YAML text → ConfigNode, and overrides on top of it.
#include <absl/strings/numbers.h>
#include <absl/strings/str_split.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/parser.h>

#include <sstream>
#include <stdexcept>

#include "parvl/base/config.h"
#include "parvl/base/file.h"
#include "parvl/base/text.h"

namespace parvl {
namespace {

// What stops the parser from inside an event; never leaves this file.
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Builds the tree from yaml-cpp's events, so that nothing is expanded or kept that a limit forbids. yaml-cpp's own tree
// would expand aliases and lets the last of two equal keys win.
class TreeBuilder : public YAML::EventHandler {
 public:
  TreeBuilder(std::shared_ptr<const std::string> source, bool is_override, const ConfigLimits& limits)
      : source_(std::move(source)), is_override_(is_override), limits_(limits) {}

  ConfigNode root;

  void OnDocumentStart(const YAML::Mark& mark) override {
    if (++documents_ > 1) refuse(mark, "a second document ('---') starts here; put everything into one");
  }
  void OnDocumentEnd() override {}
  void OnAnchor(const YAML::Mark& mark, const std::string&) override { refuse(mark, kNoAnchors); }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override { refuse(mark, kNoAnchors); }
  void OnNull(const YAML::Mark& mark, YAML::anchor_t) override { add(mark, ConfigNode{}); }

  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t, const std::string& value) override {
    check_tag(mark, tag);
    ConfigNode node;
    node.quoted = tag == "!";
    const bool is_null = !node.quoted && (value.empty() || value == "~" || value == "null");
    node.kind = is_null && !expecting_key() ? ConfigNode::Kind::kNull : ConfigNode::Kind::kScalar;
    node.text = value;
    add(mark, std::move(node));
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t,
                       YAML::EmitterStyle::value) override {
    check_tag(mark, tag);
    open(mark, ConfigNode::Kind::kList);
  }
  void OnSequenceEnd() override { stack_.pop_back(); }
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t, YAML::EmitterStyle::value) override {
    check_tag(mark, tag);
    open(mark, ConfigNode::Kind::kMap);
  }
  void OnMapEnd() override { stack_.pop_back(); }

 private:
  static constexpr const char* kNoAnchors = "anchors and aliases (& and *) are not supported; write the value out";

  static constexpr const char* kBadKey = "a list or section stands where a key belongs; check brackets and indentation";

  struct Level {
    ConfigNode* node;
    bool value_is_next = false;  // in a map: the key was read
  };

  [[noreturn]] void refuse(const YAML::Mark& mark, const std::string& message) {
    ConfigNode at;
    locate(mark, at);
    throw Refused(absl::StrCat(at.place(), ": ", message));
  }
  void locate(const YAML::Mark& mark, ConfigNode& node) {
    node.source = source_;
    node.line = is_override_ ? 0 : mark.line + 1;
  }
  void check_tag(const YAML::Mark& mark, const std::string& tag) {
    if (!tag.empty() && tag != "?" && tag != "!") {
      refuse(mark, absl::StrCat("the tag ", excerpt(tag), " is not supported; leave it out"));
    }
  }
  bool expecting_key() const {
    return !stack_.empty() && stack_.back().node->kind == ConfigNode::Kind::kMap && !stack_.back().value_is_next;
  }
  // Pointers into the tree stay valid: a container only grows while its last element is being filled or after it is
  // done.
  ConfigNode* add(const YAML::Mark& mark, ConfigNode node) {
    if (++nodes_ > limits_.max_nodes) refuse(mark, absl::StrCat("more than ", limits_.max_nodes, " values"));
    locate(mark, node);
    if (stack_.empty()) {
      root = std::move(node);
      return &root;
    }
    Level& level = stack_.back();
    if (level.node->kind == ConfigNode::Kind::kList) {
      level.node->items.push_back(std::move(node));
      return &level.node->items.back();
    }
    if (!level.value_is_next) {
      add_key(mark, node);
      return nullptr;
    }
    level.value_is_next = false;
    level.node->entries.back().value = std::move(node);
    return &level.node->entries.back().value;
  }
  void add_key(const YAML::Mark& mark, const ConfigNode& key) {
    if (key.kind != ConfigNode::Kind::kScalar) refuse(mark, kBadKey);
    Level& level = stack_.back();
    if (const ConfigEntry* first = level.node->find(key.text)) {
      refuse(mark, absl::StrCat("the key ", excerpt(key.text), " is given a second time; it first stands at ",
                                first->key_place.place(), "; remove one"));
    }
    ConfigEntry entry;
    entry.key = key.text;
    locate(mark, entry.key_place);
    level.node->entries.push_back(std::move(entry));
    level.value_is_next = true;
  }
  void open(const YAML::Mark& mark, ConfigNode::Kind kind) {
    if (static_cast<int>(stack_.size()) >= limits_.max_depth) {
      refuse(mark, absl::StrCat("nested deeper than ", limits_.max_depth, " levels"));
    }
    ConfigNode node;
    node.kind = kind;
    ConfigNode* placed = add(mark, std::move(node));
    if (placed == nullptr) refuse(mark, kBadKey);
    stack_.push_back({placed, false});
  }

  std::shared_ptr<const std::string> source_;
  bool is_override_;
  ConfigLimits limits_;
  std::vector<Level> stack_;
  size_t nodes_ = 0;
  int documents_ = 0;
};

absl::StatusOr<ConfigNode> parse_yaml(std::string_view text, const std::string& name, bool is_override,
                                      const ConfigLimits& limits) {
  if (text.size() > limits.max_bytes) {
    return invalid(name, ": ", text.size(), " bytes of YAML are over the limit of ", limits.max_bytes);
  }
  try {
    TreeBuilder builder(std::make_shared<const std::string>(name), is_override, limits);
    // Without the last line break, since yaml-cpp takes a quote that is never closed for closed when one follows.
    while (!text.empty() && (text.back() == '\n' || text.back() == '\r' || text.back() == ' ')) text.remove_suffix(1);
    std::istringstream stream{std::string(text)};
    YAML::Parser parser(stream);
    while (parser.HandleNextDocument(builder)) {
    }
    return std::move(builder.root);
  } catch (const Refused& e) {
    return invalid(e.what());
  } catch (const YAML::Exception& e) {
    const std::string line = is_override ? "" : absl::StrCat(":", e.mark.line + 1);
    return invalid(name, line, ": not valid YAML: ", one_line(e.msg));
  }
}

// The child of `node` that one part of a dotted path names; created in a map, an existing index in a list.
absl::StatusOr<ConfigNode*> step_into(ConfigNode& node, const std::string& part, const ConfigNode& origin,
                                      const std::string& passed) {
  if (node.kind == ConfigNode::Kind::kNull) {
    node.kind = ConfigNode::Kind::kMap;
    node.source = origin.source;
    node.line = 0;
  }
  if (node.kind == ConfigNode::Kind::kList) {
    uint64_t index = 0;
    if (!absl::SimpleAtoi(part, &index) || index >= node.items.size()) {
      return invalid(*origin.source, ": ", excerpt(passed), " is a list of ", node.items.size(), "; ", excerpt(part),
                     " is not an index into it");
    }
    return &node.items[index];
  }
  if (node.kind != ConfigNode::Kind::kMap) {
    return invalid(*origin.source, ": ", excerpt(passed), " is a plain value, so it has no key ", excerpt(part));
  }
  for (ConfigEntry& entry : node.entries) {
    if (entry.key == part) return &entry.value;
  }
  ConfigEntry entry;
  entry.key = part;
  entry.key_place = origin;
  entry.value.source = origin.source;
  node.entries.push_back(std::move(entry));
  return &node.entries.back().value;
}

}  // namespace

absl::StatusOr<ConfigNode> parse_config(std::string_view text, const std::string& name, const ConfigLimits& limits) {
  PARVL_ASSIGN_OR_RETURN(ConfigNode root, parse_yaml(text, name, /*is_override=*/false, limits));
  if (root.kind == ConfigNode::Kind::kNull) {
    root.kind = ConfigNode::Kind::kMap;
    root.source = std::make_shared<const std::string>(name);
    root.line = 1;
  }
  if (root.kind != ConfigNode::Kind::kMap) return invalid(root.place(), ": the file must hold `key: value` lines");
  return root;
}

absl::Status apply_override(ConfigNode& root, const std::string& override_text, const ConfigLimits& limits) {
  const std::string name = "--set " + excerpt(override_text, 200);
  const size_t equals = override_text.find('=');
  const std::string key = override_text.substr(0, equals);
  const std::vector<std::string> parts = absl::StrSplit(key, '.');
  bool complete = equals != std::string::npos;
  for (const std::string& part : parts) complete = complete && !part.empty();
  if (!complete) return invalid(name, ": write it as section.key=value");
  if (static_cast<int>(parts.size()) > limits.max_depth)
    return invalid(name, ": deeper than ", limits.max_depth, " levels");
  PARVL_ASSIGN_OR_RETURN(ConfigNode value,
                         parse_yaml(override_text.substr(equals + 1), name, /*is_override=*/true, limits));
  ConfigNode origin;
  origin.source = std::make_shared<const std::string>(name);
  if (value.source == nullptr) value.source = origin.source;

  ConfigNode* node = &root;
  std::string passed;
  ConfigEntry* entry = nullptr;
  for (const std::string& part : parts) {
    ConfigNode* parent = node;
    PARVL_ASSIGN_OR_RETURN(node, step_into(*parent, part, origin, passed));
    passed += (passed.empty() ? "" : ".") + part;
    entry = nullptr;
    for (ConfigEntry& candidate : parent->entries) {
      if (candidate.key == part) entry = &candidate;
    }
  }
  *node = std::move(value);
  if (entry != nullptr) entry->key_place = origin;
  return absl::OkStatus();
}

absl::StatusOr<ConfigNode> load_config(const std::string& path, const std::vector<std::string>& overrides,
                                       const ConfigLimits& limits) {
  PARVL_ASSIGN_OR_RETURN(const std::string text, read_file(path, limits.max_bytes));
  PARVL_ASSIGN_OR_RETURN(ConfigNode root, parse_config(text, path, limits));
  for (const std::string& override_text : overrides) PARVL_RETURN_IF_ERROR(apply_override(root, override_text, limits));
  return root;
}

}  // namespace parvl
