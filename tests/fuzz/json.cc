// JSON from outside: parsed or refused with a good message; what parsed is written and read back as the same value.
#include "parvl/base/json.h"

#include "tests/fuzz/fuzz.h"

std::vector<std::string> fuzz_seeds() {
  return {
      R"({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi \u00e9\ud83d\ude00"}]}], "max_tokens": 12})",
      R"({"a": 1.5e-3, "b": [true, false, null, -0, 18446744073709551615, -9223372036854775808], "c": {"d": {"e": []}}})",
      R"([[], {}, "", 0, 1e308, "\\\"\/\b\f\n\r\t"])",
      R"({"model.layers.0.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}})",
      "  {\"a\" : \"b\"}  ",
      "\"text\"",
  };
}

namespace {

template <typename T>
void read_value(const parvl::Json& object, const std::string& key, const T& fallback) {
  const auto value = parvl::json_value<T>(object, key, fallback);
  if (!value.ok()) require_good_message(std::string(value.status().message()).substr(0, 1000));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto json = parvl::parse_json(text, "input", {.max_bytes = 1 << 16, .max_depth = 16});
  if (!json.ok()) {
    require_good_message(std::string(json.status().message()));
    return 0;
  }
  const std::string written = json->dump();
  const auto again = parvl::parse_json(written, "written", {.max_bytes = 1 << 20, .max_depth = 16});
  FUZZ_REQUIRE(again.ok());
  FUZZ_REQUIRE(*again == *json);
  if (!json->is_object()) return 0;
  for (const char* key : {"a", "b", "c", "messages", "max_tokens"}) {
    read_value<bool>(*json, key, false);
    read_value<int64_t>(*json, key, 0);
    read_value<double>(*json, key, 0.0);
    read_value<std::string>(*json, key, "");
  }
  return 0;
}
