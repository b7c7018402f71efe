// A tokenizer.json, a line feed apart from a text: the file is read or refused with a good message; what it encodes has
// its ranges in order, and comes back when every byte has a token.
#include "parvl/media/tokenizer.h"
#include "parvl/media/unicode.h"
#include "tests/fuzz/fuzz.h"

namespace {

parvl::Json small_file() {
  parvl::Json vocab = parvl::Json::object();
  int id = 0;
  for (char32_t code = 0; code < 0x144; ++code) {
    std::string text, bytes;
    parvl::append_utf8(text, code);
    if (parvl::bytes_of_spelled(text, bytes)) vocab[text] = id++;
  }
  vocab["th"] = id++;
  vocab["the"] = id++;
  const parvl::Json split = {{"type", "Split"},
                             {"pattern", {{"Regex", R"( ?\p{L}+|\p{N}{1,3}|\s+(?!\S)|\s+|[^\s\p{L}\p{N}]+)"}}},
                             {"behavior", "Isolated"},
                             {"invert", false}};
  const parvl::Json bytes = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};
  return {
      {"version", "1.0"},
      {"added_tokens", {{{"id", id}, {"content", "<s>"}, {"special", true}, {"normalized", false}, {"rstrip", true}}}},
      {"normalizer", {{"type", "NFC"}}},
      {"pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", {split, bytes}}}},
      {"post_processor",
       {{"type", "TemplateProcessing"},
        {"single",
         {{{"SpecialToken", {{"id", "<s>"}, {"type_id", 0}}}}, {{"Sequence", {{"id", "A"}, {"type_id", 0}}}}}},
        {"special_tokens", {{"<s>", {{"id", "<s>"}, {"ids", {id}}, {"tokens", {"<s>"}}}}}}}},
      {"decoder", {{"type", "ByteLevel"}}},
      {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", {"t h", "th e"}}}}};
}

void check_encoding(const parvl::Tokenizer& tokenizer, const std::vector<parvl::TextRun>& runs, bool complete) {
  std::string all;
  for (const parvl::TextRun& run : runs) all += run.text;
  size_t last = 0;
  std::vector<parvl::TokenId> ids;
  for (const parvl::EncodedToken& token : tokenizer.encode(runs)) {
    FUZZ_REQUIRE(token.id >= 0 && token.id < tokenizer.vocab_size());
    FUZZ_REQUIRE(token.begin <= token.end && token.end <= all.size() && token.end >= last);
    last = token.end;
    ids.push_back(token.id);
  }
  const std::string back = tokenizer.decode(ids, false);
  FUZZ_REQUIRE(parvl::is_valid_utf8(back));
  parvl::Utf8Stream stream;
  std::string streamed;
  for (const parvl::TokenId id : ids) streamed += stream.push(tokenizer.token_bytes(id));
  FUZZ_REQUIRE(streamed + stream.flush() == back);
  if (complete) FUZZ_REQUIRE(back == parvl::repair_utf8(all));
}

}  // namespace

std::vector<std::string> fuzz_seeds() {
  const parvl::Json file = small_file();
  parvl::Json plain = file;
  plain["normalizer"] = nullptr;
  plain["pre_tokenizer"] = {{"type", "ByteLevel"}, {"add_prefix_space", true}, {"use_regex", true}};
  plain["model"]["merges"] = {{"t", "h"}, {"th", "e"}};
  plain["model"]["ignore_merges"] = true;
  // Texts alone go to a fixed file; a whole file is given after "{".
  return {"the <s> 1234 e\xcc\x81 \xff\xe2\x82", "<s><|x|>\r\n\t  the", file.dump() + "\nthe <s> x",
          plain.dump() + "\nthe  1"};
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  static const std::shared_ptr<const parvl::Tokenizer> fixed = [] {
    parvl::Json file = small_file();
    file["normalizer"] = nullptr;  // so that a text comes back as it was
    file["added_tokens"][0]["rstrip"] = false;
    return *parvl::Tokenizer::from_json(file, "fixed");
  }();
  if (input.substr(0, 1) != "{") {
    check_encoding(*fixed, {{std::string(input), true}}, true);
    const std::string half(input.substr(0, size / 2)), rest(input.substr(size / 2));
    check_encoding(*fixed, {{half, true}, {rest, false}}, true);
    return 0;
  }
  const size_t line = input.find('\n');
  const auto json = parvl::parse_json(input.substr(0, line), "input", {.max_bytes = 1 << 16, .max_depth = 16});
  if (!json.ok()) return 0;
  const auto tokenizer = parvl::Tokenizer::from_json(*json, "input");
  if (!tokenizer.ok()) {
    require_good_message(std::string(tokenizer.status().message()));
    return 0;
  }
  const std::string text(line == std::string_view::npos ? "the <s> 12" : input.substr(line + 1));
  check_encoding(**tokenizer, {{text, true}, {" typed <s>", false}}, false);
  (*tokenizer)->encode_with_prefix(text, false);
  return 0;
}
