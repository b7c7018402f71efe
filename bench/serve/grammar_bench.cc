// What grammars cost over a vocabulary of the size of Qwen2's (152,000 tokens, made up here): compiling, and the mask
// of each token. One JSON line a schema.
//
// usage: grammar_bench [TOKENS]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "parvl/base/clock.h"
#include "parvl/base/rng.h"
#include "parvl/media/grammar.h"
#include "parvl/media/json_schema.h"
#include "tests/unit/byte_level_tokenizer.h"

namespace parvl {
namespace {

constexpr const char* kSchemas[] = {
    R"({"type":"object"})",
    R"({"type":"object","properties":{"color":{"enum":["red","green","blue"]}},"required":["color"]})",
    R"({"type":"object","properties":{"name":{"type":"string"},"age":{"type":"integer","minimum":0,"maximum":150},
        "mail":{"type":"string","format":"email"},"tags":{"type":"array","items":{"type":"string","maxLength":20},"maxItems":8},
        "address":{"type":"object","properties":{"street":{"type":"string"},"zip":{"type":"string","pattern":"[0-9]{5}"},
        "country":{"anyOf":[{"enum":["DE","FR","IT"]},{"type":"null"}]}},"required":["street","zip"]},
        "score":{"type":"number"}},"required":["name","age","tags","address"]})",
};

// How a byte-level vocabulary spells a byte.
std::string spelled(int b) {
  static const std::vector<std::string> kSpelling = [] {
    std::vector<std::string> out(256);
    int next = 0x100;
    for (int i = 0; i < 256; ++i) {
      const bool plain = (i >= 0x21 && i <= 0x7e) || (i >= 0xa1 && i <= 0xac) || (i >= 0xae && i <= 0xff);
      const int code = plain ? i : next++;
      out[i] = code < 0x80 ? std::string(1, static_cast<char>(code))
                           : std::string{static_cast<char>(0xc0 | code >> 6), static_cast<char>(0x80 | (code & 0x3f))};
    }
    return out;
  }();
  return kSpelling[b];
}

// Bytes, words with and without a space before them, runs of signs, and pieces of text in three-byte characters.
std::shared_ptr<const Tokenizer> make_tokenizer(size_t size) {
  Rng rng(1);
  std::set<std::string> texts;
  for (int b = 0; b < 256; ++b) texts.insert(std::string(1, static_cast<char>(b)));
  const std::string signs = "{}[]\":,.;()=<>-_/\\*+ \n\t'#";
  while (texts.size() < size) {
    std::string text;
    const int kind = static_cast<int>(rng.next() % 10);
    const int length = 1 + static_cast<int>(rng.next() % 9);
    if (kind < 5) text = " ";
    for (int i = 0; i < length; ++i) {
      if (kind < 8) text += static_cast<char>((kind == 7 && i == 0 ? 'A' : 'a') + rng.next() % 26);
      if (kind == 8) text += signs[rng.next() % signs.size()];
      if (kind == 9 && i < 4) {
        text += {static_cast<char>(0xe4 + rng.next() % 6), static_cast<char>(0x80 + rng.next() % 64),
                 static_cast<char>(0x80 + rng.next() % 64)};
      }
    }
    texts.insert(text);
  }
  Json vocab = Json::object();
  TokenId id = 0;
  for (const std::string& text : texts) {
    std::string key;
    for (const char c : text) key += spelled(static_cast<unsigned char>(c));
    vocab[key] = id++;
  }
  return byte_level_tokenizer(vocab);
}

// Random answers; the times of their masks in microseconds.
std::vector<double> follow(const std::shared_ptr<const Grammar>& grammar, TokenId end, const Clock& clock) {
  Rng rng(2);
  std::vector<double> times;
  std::vector<uint32_t> mask;
  while (times.size() < 2000) {
    GrammarMatcher matcher(grammar);
    for (int step = 0; step < 300 && !matcher.ended(); ++step) {
      const int64_t start = clock.now_ns();
      if (!matcher.fill(mask).ok()) std::abort();
      times.push_back(static_cast<double>(clock.now_ns() - start) / 1e3);
      std::vector<TokenId> allowed;
      for (TokenId id = 0; id <= end; ++id) {
        if ((mask[static_cast<size_t>(id) / 32] >> (id % 32) & 1) != 0) allowed.push_back(id);
      }
      const bool ends = allowed.back() == end;
      if (!matcher.accept(ends ? end : allowed[rng.next() % allowed.size()]).ok()) std::abort();
    }
  }
  std::sort(times.begin(), times.end());
  return times;
}

void run(size_t size) {
  const RealClock clock;
  const auto tokenizer = make_tokenizer(size);
  const TokenId end = tokenizer->id_of("<end>");
  GrammarCompiler compiler(*tokenizer, {end});
  double start = clock.now_seconds();
  if (!compiler.compile(grammar_source(json_format(OrderedJson{{"type", "null"}}))).ok()) std::abort();
  std::printf("{\"tokens\": %zu, \"first_ms\": %.1f}\n", size, (clock.now_seconds() - start) * 1e3);
  for (const char* text : kSchemas) {
    const OrderedJson schema = *supported_schema(OrderedJson::parse(text), "schema");
    start = clock.now_seconds();
    const auto grammar = compiler.compile(grammar_source(json_format(schema)));
    const double compile_ms = (clock.now_seconds() - start) * 1e3;
    if (!grammar.ok()) std::abort();
    const std::vector<double> times = follow(*grammar, end, clock);
    std::printf(
        "{\"compile_ms\": %.1f, \"kib\": %lld, \"mask_us_mean\": %.1f, \"mask_us_p99\": %.1f, \"mask_us_max\": %.1f}\n",
        compile_ms, static_cast<long long>((*grammar)->bytes() >> 10),
        std::accumulate(times.begin(), times.end(), 0.0) / static_cast<double>(times.size()),
        times[times.size() * 99 / 100], times.back());
  }
}

}  // namespace
}  // namespace parvl

int main(int argc, char** argv) {
  parvl::run(argc > 1 ? static_cast<size_t>(std::atoll(argv[1])) : 152'000);
  return 0;
}
