// What the parity tests talk to: one JSON command a line on standard input, one JSON answer a line on standard output.
// Pixels and floats go through the file named by "out". An error is {"error": message}.
#include <fstream>
#include <iostream>
#include <map>
#include <string>

#include "parvl/base/file.h"
#include "parvl/base/json.h"
#include "parvl/media/image.h"
#include "parvl/media/image_processor.h"
#include "parvl/media/prompt.h"
#include "parvl/media/tokenizer.h"

namespace parvl {
namespace {

absl::Status write_out(const Json& command, const void* data, size_t bytes) {
  std::ofstream out(command.at("out").get<std::string>(), std::ios::binary);
  out.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
  if (!out) return failed("cannot write the 'out' file");
  return absl::OkStatus();
}

absl::StatusOr<Image> raw_image(const Json& command) {
  PARVL_ASSIGN_OR_RETURN(std::string pixels, read_file(command.at("file").get<std::string>()));
  return Image{command.at("width"), command.at("height"), {pixels.begin(), pixels.end()}};
}

absl::StatusOr<Json> image_answer(const Json& command, const Image& image) {
  PARVL_RETURN_IF_ERROR(write_out(command, image.rgb.data(), image.rgb.size()));
  return Json{{"width", image.width}, {"height", image.height}};
}

absl::StatusOr<Json> decode(const Json& command) {
  PARVL_ASSIGN_OR_RETURN(std::string bytes, read_file(command.at("file").get<std::string>()));
  ImageLimits limits;
  limits.max_pixels = command.value("max_pixels", limits.max_pixels);
  PARVL_ASSIGN_OR_RETURN(ImageSize size, read_image_size(bytes, limits));
  PARVL_ASSIGN_OR_RETURN(Image image, decode_image(bytes, limits));
  PARVL_ASSIGN_OR_RETURN(Json answer, image_answer(command, image));
  answer["header"] = {size.width, size.height};
  return answer;
}

absl::StatusOr<Json> resize(const Json& command) {
  PARVL_ASSIGN_OR_RETURN(Image image, raw_image(command));
  return image_answer(command,
                      resize_like_pil(image, command.at("to")[0], command.at("to")[1], command.at("resample")));
}

absl::StatusOr<Json> turn(const Json& command) {
  PARVL_ASSIGN_OR_RETURN(Image image, raw_image(command));
  return image_answer(command, dihedral(image, command.at("index")));
}

absl::StatusOr<Json> to_png(const Json& command) {
  PARVL_ASSIGN_OR_RETURN(Image image, raw_image(command));
  const std::string png = encode_png(image);
  PARVL_RETURN_IF_ERROR(write_out(command, png.data(), png.size()));
  return Json::object();
}

absl::StatusOr<Json> process(const Json& command) {
  PARVL_ASSIGN_OR_RETURN(ImageProcessor processor, ImageProcessor::load(command.at("dir")));
  PARVL_ASSIGN_OR_RETURN(Image image, raw_image(command));
  PARVL_ASSIGN_OR_RETURN(ProcessedImage done, processor.process(image));
  PARVL_RETURN_IF_ERROR(write_out(command, done.patches.data(), done.patches.size() * sizeof(float)));
  return Json{{"grid", {done.grid_t, done.grid_h, done.grid_w}}, {"tokens", done.num_tokens()}};
}

absl::StatusOr<std::shared_ptr<const Tokenizer>> tokenizer_of(const Json& command) {
  static std::map<std::string, std::shared_ptr<const Tokenizer>> loaded;
  const std::string dir = command.at("dir");
  if (!loaded.contains(dir)) {
    PARVL_ASSIGN_OR_RETURN(loaded[dir], Tokenizer::load(dir));
  }
  return loaded[dir];
}

// "runs": [[text, trusted], ...].
absl::StatusOr<Json> encode(const Json& command) {
  PARVL_ASSIGN_OR_RETURN(auto tokenizer, tokenizer_of(command));
  std::vector<TextRun> runs;
  for (const Json& run : command.at("runs")) runs.push_back({run[0], run[1]});
  Json ids = Json::array(), ranges = Json::array();
  for (const EncodedToken& token : tokenizer->encode(runs)) {
    ids.push_back(token.id);
    ranges.push_back({token.begin, token.end});
  }
  return Json{{"ids", ids}, {"ranges", ranges}};
}

absl::StatusOr<Json> encode_with_prefix(const Json& command) {
  PARVL_ASSIGN_OR_RETURN(auto tokenizer, tokenizer_of(command));
  return Json{{"ids", tokenizer->encode_with_prefix(command.at("text").get<std::string>(), true)}};
}

absl::StatusOr<Json> decode_ids(const Json& command) {
  PARVL_ASSIGN_OR_RETURN(auto tokenizer, tokenizer_of(command));
  const std::vector<TokenId> ids = command.at("ids");
  Utf8Stream stream;
  std::string streamed;
  for (const TokenId id : ids) streamed += stream.push(tokenizer->token_bytes(id));
  streamed += stream.flush();
  return Json{{"text", tokenizer->decode(ids, command.at("skip_special"))}, {"streamed", streamed}};
}

absl::StatusOr<Json> vocabulary(const Json& command) {
  PARVL_ASSIGN_OR_RETURN(auto tokenizer, tokenizer_of(command));
  Json ids = Json::array();
  for (const Json& token : command.at("tokens")) ids.push_back(tokenizer->id_of(token.get<std::string>()));
  return Json{{"ids", ids}, {"size", tokenizer->vocab_size()}};
}

// "messages" as in the OpenAI API, their images as {"type": "image"}; "images": [[file of raw RGB, width, height],
// ...].
absl::StatusOr<Json> build(const Json& command) {
  static std::map<std::string, std::shared_ptr<const PromptBuilder>> loaded;
  const std::string dir = command.at("dir");
  if (!loaded.contains(dir)) {
    PARVL_ASSIGN_OR_RETURN(loaded[dir], PromptBuilder::load(dir));
  }
  const PromptBuilder& builder = *loaded[dir];
  std::vector<std::shared_ptr<const ProcessedImage>> images;
  for (const Json& image : command.value("images", Json::array())) {
    PARVL_ASSIGN_OR_RETURN(Image raw, raw_image({{"file", image[0]}, {"width", image[1]}, {"height", image[2]}}));
    PARVL_ASSIGN_OR_RETURN(ProcessedImage done, builder.image_processor().process(raw));
    images.push_back(std::make_shared<const ProcessedImage>(std::move(done)));
  }
  std::vector<Message> messages;
  int next_image = 0;
  for (const Json& json : command.at("messages")) {
    Message message{json.at("role"), {}};
    const Json text = {{"type", "text"}, {"text", json.at("content")}};
    for (const Json& part : json["content"].is_string() ? Json::array({text}) : json["content"]) {
      if (part.at("type") == "image") {
        message.content.push_back({ContentPart::Kind::kImage, "", part.value("index", next_image++)});
      } else {
        message.content.push_back({ContentPart::Kind::kText, part.at("text"), -1});
      }
    }
    messages.push_back(std::move(message));
  }
  PromptOptions options;
  options.add_generation_prompt = command.value("add_generation_prompt", true);
  options.mark_targets = command.value("mark_targets", false);
  options.template_arguments = command.value("arguments", Json());
  PARVL_ASSIGN_OR_RETURN(Prompt prompt, builder.build(messages, std::move(images), options));
  Json media = Json::array();
  for (const MediaSpan& span : prompt.media) media.push_back({span.image_index, span.begin, span.length});
  return Json{{"ids", prompt.ids}, {"media", media}, {"is_target", prompt.is_target}};
}

absl::StatusOr<Json> answer(const Json& command) {
  const std::string op = command.at("op");
  if (op == "decode") return decode(command);
  if (op == "resize") return resize(command);
  if (op == "dihedral") return turn(command);
  if (op == "png") return to_png(command);
  if (op == "process") return process(command);
  if (op == "encode") return encode(command);
  if (op == "encode_with_prefix") return encode_with_prefix(command);
  if (op == "decode_ids") return decode_ids(command);
  if (op == "vocabulary") return vocabulary(command);
  if (op == "build") return build(command);
  return invalid("unknown op ", op);
}

}  // namespace
}  // namespace parvl

int main() {
  std::string line;
  while (std::getline(std::cin, line)) {
    const auto result = parvl::answer(parvl::Json::parse(line));
    const parvl::Json out = result.ok() ? *result : parvl::Json{{"error", std::string(result.status().message())}};
    std::cout << out.dump() << std::endl;
  }
}
