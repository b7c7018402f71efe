#include "parvl/media/prompt.h"

#include <absl/strings/str_join.h>

#include <algorithm>
#include <optional>

#include "parvl/base/check.h"
#include "parvl/base/file.h"
#include "parvl/media/chat_template.h"

namespace parvl {
namespace {

// Where the tokens of an assistant's turn stand in the rendered text: its content and what ends the turn.
struct Turn {
  size_t message = 0;
  size_t begin = 0;
  size_t end = 0;
};

std::string joined(const std::vector<TextRun>& runs) {
  std::string text;
  for (const TextRun& run : runs) text += run.text;
  return text;
}

// The image parts of all messages, in order, as indices into the images; checked.
absl::StatusOr<std::vector<int>> image_order(const std::vector<Message>& messages, size_t images) {
  std::vector<int> order;
  for (size_t m = 0; m < messages.size(); ++m) {
    for (const ContentPart& part : messages[m].content) {
      if (part.kind != ContentPart::Kind::kImage) continue;
      if (part.image_index < 0 || static_cast<size_t>(part.image_index) >= images) {
        return invalid("message ", m, " names image ", part.image_index, ", but there are ", images, " images");
      }
      order.push_back(part.image_index);
    }
  }
  return order;
}

}  // namespace

struct PromptBuilder::Impl {
  std::shared_ptr<const Tokenizer> tokenizer;
  std::shared_ptr<const ChatTemplate> chat;
  std::optional<ImageProcessor> images;
  TokenId image_token = -1;
  ToolSyntax tools;
  std::string why_no_images = "this model takes no images";

  absl::Status read_image_parts(const std::string& dir);
  absl::StatusOr<std::vector<Turn>> find_turns(const std::vector<Message>& messages, const std::string& whole,
                                               const PromptOptions& options) const;
  std::vector<uint8_t> mark(const std::vector<EncodedToken>& tokens, const std::vector<Turn>& turns) const;
};

PromptBuilder::PromptBuilder(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
PromptBuilder::~PromptBuilder() = default;
const Tokenizer& PromptBuilder::tokenizer() const { return *impl_->tokenizer; }
bool PromptBuilder::has_images() const { return impl_->images.has_value(); }
const std::string& PromptBuilder::why_no_images() const { return impl_->why_no_images; }

TokenId PromptBuilder::image_token() const { return impl_->image_token; }

bool PromptBuilder::has_chat_template() const { return impl_->chat != nullptr; }
const ToolSyntax& PromptBuilder::tool_syntax() const { return impl_->tools; }
const ImageProcessor& PromptBuilder::image_processor() const {
  PARVL_CHECK(has_images(), "the image processor of a text-only model");
  return *impl_->images;
}

absl::Status PromptBuilder::Impl::read_image_parts(const std::string& dir) {
  auto processor = ImageProcessor::load(dir);
  const std::string path = dir + "/config.json";
  if (absl::IsNotFound(processor.status())) {  // a text-only model, or one that lacks the file and can do text
    const auto config = read_json_file(path);
    if (config.ok() && config->is_object() && config->contains("vision_config")) {
      why_no_images = dir + "/preprocessor_config.json is missing, and the model takes images only with it; get it " +
                      "from where the model is from";
    }
    return absl::OkStatus();
  }
  PARVL_RETURN_IF_ERROR(processor.status());
  PARVL_ASSIGN_OR_RETURN(Json config, read_json_file(path));
  if (!config.is_object()) return invalid(path, " must be a JSON object");
  auto id = json_value<int64_t>(config, "image_token_id", -1);
  if (!id.ok()) return with_context(id.status(), path);
  if (*id < 0) return invalid(path, " has no 'image_token_id', though ", dir, " has an image processor");
  if (*id >= tokenizer->vocab_size() || !tokenizer->is_added(static_cast<TokenId>(*id))) {
    return invalid(path, ": 'image_token_id' ", *id, " is no added token of the tokenizer");
  }
  image_token = static_cast<TokenId>(*id);
  images = *std::move(processor);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const PromptBuilder>> PromptBuilder::load(const std::string& dir) {
  auto impl = std::make_unique<Impl>();
  PARVL_ASSIGN_OR_RETURN(impl->tokenizer, Tokenizer::load(dir));
  PARVL_ASSIGN_OR_RETURN(impl->chat, ChatTemplate::load(dir, *impl->tokenizer));
  if (impl->chat != nullptr) impl->tools = find_tool_syntax(*impl->chat);
  PARVL_RETURN_IF_ERROR(impl->read_image_parts(dir));
  return std::shared_ptr<const PromptBuilder>(new PromptBuilder(std::move(impl)));
}

// Each assistant turn lies between two renderings of the messages: those before it, asking for an answer, and those up
// to it. A template in which these are no beginnings of the whole text has no such place to show.
absl::StatusOr<std::vector<Turn>> PromptBuilder::Impl::find_turns(const std::vector<Message>& messages,
                                                                  const std::string& whole,
                                                                  const PromptOptions& options) const {
  std::vector<Turn> turns;
  for (size_t m = 0; m < messages.size(); ++m) {
    if (messages[m].role != "assistant") continue;
    const auto end = messages.begin() + static_cast<std::ptrdiff_t>(m);
    PromptOptions asking = options, told = options;
    asking.add_generation_prompt = true;
    told.add_generation_prompt = false;
    PARVL_ASSIGN_OR_RETURN(auto before, chat->render({messages.begin(), end}, asking));
    PARVL_ASSIGN_OR_RETURN(auto after, chat->render({messages.begin(), end + 1}, told));
    const std::string first = joined(before), second = joined(after);
    if (!second.starts_with(first) || !whole.starts_with(second)) {
      return invalid("message ", m, ": the chat template writes this assistant turn differently ",
                     second.starts_with(first) ? "when other messages follow" : "than the prompt for it announces",
                     ", so the tokens to learn cannot be told apart; use a template that only appends");
    }
    turns.push_back({m, first.size(), second.size()});
  }
  return turns;
}

std::vector<uint8_t> PromptBuilder::Impl::mark(const std::vector<EncodedToken>& tokens,
                                               const std::vector<Turn>& turns) const {
  std::vector<uint8_t> targets(tokens.size(), 0);
  size_t t = 0;
  for (const Turn& turn : turns) {
    while (t < tokens.size() && tokens[t].begin < turn.begin) ++t;
    const size_t first = t;
    size_t stop = first;  // past the turn's last token: the last special one, or all of them when there is none
    bool ended = false;
    for (; t < tokens.size() && tokens[t].end <= turn.end; ++t) {
      const bool special = tokenizer->is_special(tokens[t].id) && tokens[t].id != image_token;
      if (special || !ended) stop = t + 1;
      ended = ended || special;
    }
    std::fill(targets.begin() + static_cast<std::ptrdiff_t>(first), targets.begin() + static_cast<std::ptrdiff_t>(stop),
              1);
  }
  return targets;
}

absl::StatusOr<PromptText> PromptBuilder::write(const std::vector<Message>& messages, size_t images,
                                                const PromptOptions& options) const {
  if (impl_->chat == nullptr) {
    return invalid("the model has no chat template; add a chat_template.jinja, or ask for a plain completion");
  }
  PromptText text;
  PARVL_ASSIGN_OR_RETURN(text.image_order, image_order(messages, images));
  if (!text.image_order.empty() && !has_images()) return invalid("a message holds an image, and ", why_no_images());
  PARVL_ASSIGN_OR_RETURN(std::vector<TextRun> runs, impl_->chat->render(messages, options));
  const std::vector<EncodedToken> tokens = impl_->tokenizer->encode(runs);
  text.ids.reserve(tokens.size());
  for (const EncodedToken& token : tokens) text.ids.push_back(token.id);
  const auto placeholders = has_images() ? std::count(text.ids.begin(), text.ids.end(), image_token()) : 0;
  if (static_cast<size_t>(placeholders) != text.image_order.size()) {
    return invalid("the chat template writes ", placeholders, " image placeholders for ", text.image_order.size(),
                   " images; it does not fit this model's messages");
  }
  if (options.mark_targets) {
    PARVL_ASSIGN_OR_RETURN(std::vector<Turn> turns, impl_->find_turns(messages, joined(runs), options));
    text.is_target = impl_->mark(tokens, turns);
  }
  return text;
}

absl::StatusOr<Prompt> PromptBuilder::place(PromptText text,
                                            std::vector<std::shared_ptr<const ProcessedImage>> images) const {
  Prompt prompt;
  prompt.images = std::move(images);
  if (text.image_order.empty()) {
    prompt.ids = std::move(text.ids);
    prompt.is_target = std::move(text.is_target);
    return prompt;
  }
  size_t next = 0;
  for (size_t t = 0; t < text.ids.size(); ++t) {
    const bool is_image = text.ids[t] == image_token();
    int64_t copies = 1;
    if (is_image) {
      const int index = text.image_order[next++];
      const std::shared_ptr<const ProcessedImage>& image = prompt.images[static_cast<size_t>(index)];
      if (image == nullptr) return invalid("image ", index, " is missing");
      copies = image->num_tokens();
      prompt.media.push_back({index, static_cast<int64_t>(prompt.ids.size()), copies});
    }
    prompt.ids.insert(prompt.ids.end(), static_cast<size_t>(copies), text.ids[t]);
    if (!text.is_target.empty()) {
      const uint8_t learned = is_image ? 0 : text.is_target[t];
      prompt.is_target.insert(prompt.is_target.end(), static_cast<size_t>(copies), learned);
    }
  }
  return prompt;
}

absl::StatusOr<Prompt> PromptBuilder::build(const std::vector<Message>& messages,
                                            std::vector<std::shared_ptr<const ProcessedImage>> images,
                                            const PromptOptions& options) const {
  PARVL_ASSIGN_OR_RETURN(PromptText text, write(messages, images.size(), options));
  return place(std::move(text), std::move(images));
}

Prompt PromptBuilder::build_plain(std::string_view text) const {
  Prompt prompt;
  prompt.ids = impl_->tokenizer->encode_with_prefix(text, false);
  return prompt;
}

}  // namespace parvl
