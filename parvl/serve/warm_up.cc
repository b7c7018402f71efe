#include "parvl/serve/warm_up.h"

#include <algorithm>
#include <future>
#include <memory>
#include <utility>

namespace parvl {
namespace {

constexpr int kSide = 28;  // pixels, of the image; the processor makes the smallest that it may of it

// An image of one colour before a few tokens; text alone where the model takes no images, or has no room for one.
absl::StatusOr<std::shared_ptr<const Prompt>> short_prompt(const Engine& engine) {
  auto prompt = std::make_shared<Prompt>();
  const int64_t room = engine.max_model_len() - 2;
  if (engine.prompts().has_images()) {
    Image image;
    image.width = image.height = kSide;
    image.rgb.assign(size_t{3} * kSide * kSide, 127);
    PARVL_ASSIGN_OR_RETURN(ProcessedImage processed, engine.prompts().image_processor().process(image));
    const int64_t tokens = processed.num_tokens();
    if (tokens < room) {
      prompt->ids.assign(static_cast<size_t>(tokens), engine.prompts().image_token());
      prompt->media.push_back({0, 0, tokens});
      prompt->images.push_back(std::make_shared<const ProcessedImage>(std::move(processed)));
    }
  }
  const auto used = static_cast<int64_t>(prompt->ids.size());
  prompt->ids.resize(static_cast<size_t>(used + std::clamp<int64_t>(room - used, 1, 64)), 0);
  return prompt;
}

}  // namespace

absl::Status warm_up(Engine& engine) {
  EngineRequest request;
  PARVL_ASSIGN_OR_RETURN(request.prompt, short_prompt(engine));
  request.sampling.max_tokens = 2;
  request.sampling.temperature = 0;
  request.sampling.ignore_eos = true;
  auto ended = std::make_shared<std::promise<absl::Status>>();
  request.on_token = [](const TokenEvent&) {};
  request.on_end = [ended](const absl::StatusOr<GenerateResult>& result) { ended->set_value(result.status()); };
  engine.submit(std::move(request));
  return with_context(ended->get_future().get(), "the first generation");
}

}  // namespace parvl
