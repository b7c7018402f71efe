// Training data: lines are read or refused with a good message, and what is read is consistent.
#include <sstream>

#include "parvl/train/data_source.h"
#include "tests/fuzz/fuzz.h"

std::vector<std::string> fuzz_seeds() {
  return {
      R"({"messages": [{"role": "user", "content": [{"type": "image", "image": "exe"}, {"type": "text", "text": "what?"}]}, )"
      R"({"role": "assistant", "content": "a circle"}]})"
      "\n",
      "\n"
      R"({"id": 3, "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]})"
      "\r\n\n",
      R"({"messages": [{"role": "tool", "content": []}]})",
  };
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::istringstream stream(std::string(reinterpret_cast<const char*>(data), size));
  const auto samples = parvl::read_jsonl(stream, "data.jsonl", "/proc/self",
                                         {.max_line_bytes = 4000, .max_samples = 50, .max_images = 3});
  if (!samples.ok()) {
    require_good_message(std::string(samples.status().message()));
    return 0;
  }
  FUZZ_REQUIRE(samples->size() <= 50);
  for (const parvl::RawSample& sample : *samples) {
    FUZZ_REQUIRE(!sample.messages.empty() && sample.image_paths.size() <= 3);
    size_t images = 0;
    for (const parvl::Message& message : sample.messages) {
      for (const parvl::ContentPart& part : message.content) {
        if (part.kind == parvl::ContentPart::Kind::kImage) FUZZ_REQUIRE(part.image_index == static_cast<int>(images++));
      }
    }
    FUZZ_REQUIRE(images == sample.image_paths.size());
  }
  return 0;
}
