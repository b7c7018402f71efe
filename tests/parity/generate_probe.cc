// What tests/parity/generate_*.py talk to where the command line has no words for it: conversations, images inside the
// text.
//
//   generate_probe DIR    reads a JSON request a line, answers each with a JSON line:
//     {"messages": [{"role": r, "content": [{"type": "text", "text": t} | {"type": "image", "image": FILE}]}],
//     "max_tokens": n} → {"text", "token_ids", "prompt_ids", "logprobs": [...]}, greedy, going on after end tokens; or
//     {"error": message}
#include <iostream>

#include "parvl/base/file.h"
#include "parvl/base/json.h"
#include "parvl/exec/generator.h"
#include "parvl/media/image.h"

namespace parvl {
namespace {

absl::StatusOr<Prompt> read_prompt(const Json& request, const PromptBuilder& prompts) {
  std::vector<Message> messages;
  std::vector<std::shared_ptr<const ProcessedImage>> images;
  for (const Json& item : request["messages"]) {
    Message message{item["role"].get<std::string>(), {}};
    for (const Json& part : item["content"]) {
      if (part["type"] == "text") {
        message.content.push_back({ContentPart::Kind::kText, part["text"].get<std::string>(), -1});
        continue;
      }
      PARVL_ASSIGN_OR_RETURN(const std::string bytes, read_file(part["image"].get<std::string>()));
      PARVL_ASSIGN_OR_RETURN(const Image image, decode_image(bytes, ImageLimits{}));
      PARVL_ASSIGN_OR_RETURN(ProcessedImage processed, prompts.image_processor().process(image));
      message.content.push_back({ContentPart::Kind::kImage, "", static_cast<int>(images.size())});
      images.push_back(std::make_shared<const ProcessedImage>(std::move(processed)));
    }
    messages.push_back(std::move(message));
  }
  return prompts.build(messages, std::move(images), {});
}

absl::StatusOr<Json> answer(Generator& generator, const std::string& line) {
  PARVL_ASSIGN_OR_RETURN(const Json request, parse_json(line, "request"));
  PARVL_ASSIGN_OR_RETURN(const Prompt prompt, read_prompt(request, generator.prompts()));
  SamplingParams params;
  params.temperature = 0;
  params.max_tokens = request["max_tokens"].get<int64_t>();
  params.ignore_eos = true;
  params.logprobs = true;
  PARVL_ASSIGN_OR_RETURN(const GenerateResult result, generator.generate(prompt, params, {}));
  Json logprobs = Json::array();
  for (const TokenLogprob& entry : result.logprobs)
    logprobs.push_back({{"token_id", entry.token_id}, {"logprob", entry.logprob}});
  return Json{
      {"text", result.text}, {"token_ids", result.token_ids}, {"prompt_ids", prompt.ids}, {"logprobs", logprobs}};
}

absl::Status run(const std::string& dir) {
  PARVL_ASSIGN_OR_RETURN(auto generator, Generator::load(dir, {.load = {.device = "cpu"}}));
  std::string line;
  while (std::getline(std::cin, line)) {
    auto reply = answer(*generator, line);
    std::cout << (reply.ok() ? *reply : Json{{"error", std::string(reply.status().message())}}).dump() << std::endl;
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace parvl

int main(int, char** argv) {
  const absl::Status status = parvl::catch_exceptions("generate_probe", [&] { return parvl::run(argv[1]); });
  if (!status.ok()) std::cerr << status.message() << "\n";
  return parvl::exit_code(status);
}
