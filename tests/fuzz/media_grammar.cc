// A JSON schema as anyone may send it (bytes that are no JSON choose one among what schemas can say): refused with a
// good message, or compiled within its limits; and then whatever tokens are chosen among the allowed ones, one can
// always go on or end, and what ends is JSON.
#include "parvl/media/grammar.h"
#include "parvl/media/json_schema.h"
#include "tests/fuzz/fuzz.h"

std::vector<std::string> fuzz_seeds() {
  return {
      R"({"type":"object","properties":{"b":{"type":"integer","minimum":-3,"maximum":70},"a":{"type":"string","maxLength":9}},)"
      R"("required":["b"],"additionalProperties":{"type":["boolean","null"]}})",
      R"({"type":"array","items":{"enum":["x",1,null,{"k":[]}]},"minItems":1,"maxItems":4})",
      R"({"$defs":{"n":{"anyOf":[{"$ref":"#/$defs/n"},{"const":1.5},{"type":"array","items":{"$ref":"#"}}]}},"$ref":"#/$defs/n"})",
      R"({"type":"string","pattern":"^(a|b+)*[c-f]{2,5}\\d?\\S$"})",
      R"({"type":"string","format":"date-time"})",
      R"({"oneOf":[{"type":"number","exclusiveMinimum":0.5},{"type":"string"}]})",
      R"({"type":"object","patternProperties":{"^x":{"type":"integer","multipleOf":7}},"additionalProperties":false})",
      R"({"type":"object","propertyNames":{"pattern":"[a-z]{2}"},"additionalProperties":true,"maxProperties":3})",
      R"({"type":"array","prefixItems":[{},{"allOf":[{"type":"null"}]}],"items":false})",
      "{}",
  };
}

namespace {

using parvl::OrderedJson;
using parvl::TokenId;

// Bytes as choices.
class SchemaMaker {
 public:
  explicit SchemaMaker(const std::string& bytes) : bytes_(bytes) {}

  OrderedJson schema(int depth) {
    OrderedJson out = OrderedJson::object();
    const int kind = next(depth > 3 ? 7 : 13);
    if (kind == 0) return {{"enum", {value(), value(), value()}}};
    if (kind == 1) return {{"const", value()}};
    if (kind == 2) out = {{"type", "string"}, {"pattern", pattern(0)}};
    if (kind == 3) out = {{"type", "string"}, {"minLength", next(4)}, {"maxLength", next(12)}};
    if (kind == 4)
      out = {{"type", next(2) ? "integer" : "number"}, {bound(), next(200) - 100}, {bound(), next(2000) / 8.0}};
    if (kind == 5) return {{"$ref", next(2) ? "#" : "#/$defs/d"}};
    if (kind == 6) out = {{"type", {"null", "integer", "string"}}, {"maxLength", 3}};
    if (kind == 7)
      out = {{"type", "array"}, {"items", schema(depth + 1)}, {"minItems", next(3)}, {"maxItems", next(6)}};
    if (kind == 8) out = {{"type", "array"}, {"prefixItems", {schema(depth + 1), schema(depth + 1)}}, {"items", false}};
    if (kind == 9) out = {{next(2) ? "anyOf" : "oneOf", {schema(depth + 1), schema(depth + 1), schema(depth + 1)}}};
    if (kind >= 10) out = object(depth);
    if (next(16) == 0) out["multipleOf"] = next(20);
    if (next(32) == 0) out["not"] = true;
    return out;
  }

 private:
  int next(int below) { return at_ < bytes_.size() ? static_cast<unsigned char>(bytes_[at_++]) % below : 0; }
  OrderedJson value() {
    const OrderedJson values[] = {1, -2.5, "a/b\"\n", nullptr, true, {{"k", {1, "x"}}}, "\u00e9"};
    return values[next(7)];
  }
  const char* bound() {
    const char* const names[] = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"};
    return names[next(4)];
  }
  std::string pattern(int depth) {
    const char* const pieces[] = {"a",      "[b-d]", "\\d", "\\S",  ".",     "x{2,5}",
                                  "[^a-y]", "^",     "$",   "\\w+", "(y|z)", "\\."};
    std::string out;
    for (int i = next(5); i >= 0; --i) {
      const std::string inner = depth < 3 && next(3) == 0 ? "(" + pattern(depth + 1) + ")" : pieces[next(12)];
      const char* const suffixes[] = {"", "", "*", "?", "+", "{0,3}", "|"};
      out += inner + suffixes[next(7)];
    }
    return out;
  }
  OrderedJson object(int depth) {
    OrderedJson out = {{"type", "object"}};
    for (const char* key : {"a", "ab", "b\"c", "\u00e9"}) {
      if (next(3) == 0) out["properties"][key] = schema(depth + 1);
      if (out.contains("properties") && out["properties"].contains(key) && next(2)) out["required"].push_back(key);
    }
    if (next(3) == 0) out["additionalProperties"] = next(2) ? OrderedJson(false) : schema(depth + 1);
    if (next(6) == 0) out["patternProperties"][pattern(1)] = schema(depth + 1);
    if (next(6) == 0) out["propertyNames"] = {{"pattern", pattern(1)}};
    if (next(4) == 0) out["maxProperties"] = next(4);
    if (next(4) == 0) out["minProperties"] = next(3);
    return out;
  }
  const std::string& bytes_;
  size_t at_ = 0;
};

OrderedJson schema_of(const std::string& text) {
  auto json = parvl::parse_ordered_json(text, "schema");
  if (json.ok()) return *std::move(json);
  SchemaMaker maker(text);
  OrderedJson schema = maker.schema(0);
  schema["$defs"]["d"] = maker.schema(1);
  return schema;
}

// Bytes as tokens, as every byte-level vocabulary has them, a few longer ones, and an end.
const parvl::Tokenizer& tokenizer() {
  static const std::shared_ptr<const parvl::Tokenizer> kTokenizer = [] {
    parvl::Json vocab = parvl::Json::object();
    int next = 0x100;
    for (int b = 0; b < 256; ++b) {
      const bool plain = (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || (b >= 0xae && b <= 0xff);
      const int code = plain ? b : next++;
      std::string text(1, static_cast<char>(code));
      if (code >= 0x80) text = {static_cast<char>(0xc0 | code >> 6), static_cast<char>(0x80 | (code & 0x3f))};
      vocab[text] = b;
    }
    TokenId id = 256;
    for (const char* text : {"\":", "{\"", "\"}", "],", "true", "ab"}) vocab[text] = id++;
    const parvl::Json byte_level = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};
    const parvl::Json end = {{"id", id},        {"content", "<end>"},  {"single_word", false}, {"lstrip", false},
                             {"rstrip", false}, {"normalized", false}, {"special", true}};
    return *parvl::Tokenizer::from_json(
        {{"version", "1.0"},
         {"added_tokens", parvl::Json::array({end})},
         {"normalizer", nullptr},
         {"pre_tokenizer", byte_level},
         {"post_processor", nullptr},
         {"decoder", byte_level},
         {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", parvl::Json::array()}}}},
        "the fuzzer's tokenizer");
  }();
  return *kTokenizer;
}

void follow(const std::shared_ptr<const parvl::Grammar>& grammar, TokenId end, uint64_t choices) {
  parvl::GrammarMatcher matcher(grammar);
  std::vector<uint32_t> mask;
  std::string text;
  for (int step = 0; step < 60 && !matcher.ended(); ++step) {
    if (const absl::Status status = matcher.fill(mask); !status.ok()) {
      return require_good_message(std::string(status.message()));
    }
    std::vector<TokenId> allowed;
    for (TokenId id = 0; id <= end; ++id) {
      if ((mask[static_cast<size_t>(id) / 32] >> (id % 32) & 1) != 0) allowed.push_back(id);
    }
    FUZZ_REQUIRE(!allowed.empty());
    choices = choices * 6364136223846793005u + 1442695040888963407u;
    const TokenId id = allowed.back() == end ? end : allowed[(choices >> 33) % allowed.size()];
    const absl::Status status = matcher.accept(id);
    FUZZ_REQUIRE(status.ok() || absl::IsInvalidArgument(status));
    if (!status.ok()) return;
    if (id != end) text += tokenizer().token_bytes(id);
  }
  if (!matcher.ended()) return;
  parvl::Utf8Stream readable;
  const std::string shown = readable.push(text);
  FUZZ_REQUIRE(nlohmann::json::accept(shown + readable.flush()));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const TokenId kEnd = tokenizer().id_of("<end>");
  const parvl::GrammarLimits limits{.compile_steps = 2'000'000, .token_steps = 400'000, .cache_bytes = 1 << 20};
  static parvl::GrammarCompiler compiler(tokenizer(), {kEnd}, limits);
  const std::string text(reinterpret_cast<const char*>(data), size);
  const auto schema = parvl::supported_schema(schema_of(text), "schema");
  if (!schema.ok()) {
    require_good_message(std::string(schema.status().message()));
    return 0;
  }
  const auto grammar = compiler.compile(parvl::grammar_source(parvl::json_format(*schema)));
  if (!grammar.ok()) {
    FUZZ_REQUIRE(absl::IsInvalidArgument(grammar.status()));
    require_good_message(std::string(grammar.status().message()));
    return 0;
  }
  for (uint64_t run = 0; run < 3; ++run) follow(*grammar, kEnd, run + size);
  return 0;
}
