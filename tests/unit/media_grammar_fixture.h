// Grammars of a tokenizer whose tokens are bytes.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "parvl/media/grammar.h"
#include "parvl/media/json_schema.h"
#include "tests/unit/serve_fake.h"

namespace parvl {

inline constexpr TokenId kEnd = 257;  // of write_model_folder's tokenizer, whose other tokens are bytes

inline std::string repeated(const std::string& text, int times) {
  std::string out;
  for (int i = 0; i < times; ++i) out += text;
  return out;
}

class GrammarTest : public testing::Test {
 protected:
  GrammarTest() {
    write_model_folder(folder_.path());
    tokenizer_ = *Tokenizer::load(folder_.path());
    compiler_ = make_compiler();
  }
  std::unique_ptr<GrammarCompiler> make_compiler(const GrammarLimits& limits = {}) const {
    return std::make_unique<GrammarCompiler>(*tokenizer_, std::vector<TokenId>{kEnd}, limits);
  }
  static absl::StatusOr<std::string> source_of(const std::string& schema) {
    PARVL_ASSIGN_OR_RETURN(const OrderedJson parsed, parse_ordered_json(schema, "the test's schema"));
    PARVL_ASSIGN_OR_RETURN(const OrderedJson supported, supported_schema(parsed, "schema"));
    return grammar_source(json_format(supported));
  }
  absl::StatusOr<std::shared_ptr<const Grammar>> compile(const std::string& schema) {
    PARVL_ASSIGN_OR_RETURN(const std::string source, source_of(schema));
    return compiler_->compile(source);
  }
  static bool allows(const std::vector<uint32_t>& mask, TokenId id) {
    const auto word = static_cast<size_t>(id) / 32;
    return word < mask.size() && (mask[word] >> (id % 32) & 1) != 0;
  }
  // Whether the grammar takes `text`, byte by byte, and then an end.
  static bool takes(const std::shared_ptr<const Grammar>& grammar, std::string_view text) {
    GrammarMatcher matcher(grammar);
    std::vector<uint32_t> mask;
    for (const char c : text) {
      EXPECT_FALSE(matcher.ended());
      EXPECT_EQ(matcher.fill(mask), absl::OkStatus());
      if (!allows(mask, static_cast<unsigned char>(c))) return false;
      EXPECT_EQ(matcher.accept(static_cast<unsigned char>(c)), absl::OkStatus());
    }
    EXPECT_EQ(matcher.fill(mask), absl::OkStatus());
    if (!allows(mask, kEnd)) return false;
    EXPECT_EQ(matcher.accept(kEnd), absl::OkStatus());
    EXPECT_TRUE(matcher.ended());
    return true;
  }

  TemporaryFolder folder_;
  std::shared_ptr<const Tokenizer> tokenizer_;
  std::unique_ptr<GrammarCompiler> compiler_;
};

}  // namespace parvl
