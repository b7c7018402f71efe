#include "parvl/serve/warm_up.h"

#include <algorithm>
#include <future>
#include <memory>
#include <utility>

namespace parvl {
namespace {

constexpr int kSide = 28;  // pixels, of the image; the processor makes the smallest that it may of it

absl::StatusOr<ProcessedImage> small_image(const ImageProcessor& processor, uint8_t gray = 127) {
  Image image;
  image.width = image.height = kSide;
  image.rgb.assign(size_t{3} * kSide * kSide, gray);
  return processor.process(image);
}

// An image for each of its ranks, which encode each another one, before a few tokens; fewer images where there is no
// room for all, and text alone where they are not encoded here.
absl::StatusOr<std::shared_ptr<const Prompt>> short_prompt(const Engine& engine, bool encodes) {
  auto prompt = std::make_shared<Prompt>();
  const int64_t room = engine.max_model_len() - 2;
  if (encodes && engine.prompts().has_images()) {
    const size_t ranks = std::max<size_t>(1, engine.pids().size());
    for (size_t i = 0; i < ranks; ++i) {
      const auto gray = static_cast<uint8_t>(127 + i % 128);  // equal ones would be encoded once
      PARVL_ASSIGN_OR_RETURN(ProcessedImage processed, small_image(engine.prompts().image_processor(), gray));
      const auto begin = static_cast<int64_t>(prompt->ids.size());
      const int64_t tokens = processed.num_tokens();
      if (begin + tokens >= room) break;
      prompt->ids.resize(static_cast<size_t>(begin + tokens), engine.prompts().image_token());
      prompt->media.push_back({static_cast<int>(i), begin, tokens});
      prompt->images.push_back(std::make_shared<const ProcessedImage>(std::move(processed)));
    }
  }
  const auto used = static_cast<int64_t>(prompt->ids.size());
  prompt->ids.resize(static_cast<size_t>(used + std::clamp<int64_t>(room - used, 1, 64)), 0);
  return prompt;
}

}  // namespace

absl::Status warm_up(Engine& engine, bool encodes) {
  EngineRequest request;
  PARVL_ASSIGN_OR_RETURN(request.prompt, short_prompt(engine, encodes));
  request.sampling.max_tokens = 2;
  request.sampling.temperature = 0;
  request.sampling.ignore_eos = true;
  auto ended = std::make_shared<std::promise<absl::Status>>();
  request.on_token = [](const TokenEvent&) {};
  request.on_end = [ended](const absl::StatusOr<GenerateResult>& result) { ended->set_value(result.status()); };
  engine.submit(std::move(request));
  return with_context(ended->get_future().get(), "the first generation");
}

absl::Status warm_up(EncodeEngine& engine, const std::string& model_dir) {
  PARVL_ASSIGN_OR_RETURN(const ImageProcessor processor, ImageProcessor::load(model_dir));
  PARVL_ASSIGN_OR_RETURN(ProcessedImage image, small_image(processor));
  PARVL_ASSIGN_OR_RETURN(std::vector<TransferTensor> tensors, engine.layout_of(image));
  PARVL_ASSIGN_OR_RETURN(const int64_t bytes, place_tensors(tensors));
  // The places are aligned as the memory is.
  const std::unique_ptr<std::byte[], void (*)(std::byte*)> memory(
      new (std::align_val_t{64}) std::byte[static_cast<size_t>(bytes)],
      [](std::byte* at) { ::operator delete[](at, std::align_val_t{64}); });
  EncodeRequest request;
  request.image = std::make_shared<const ProcessedImage>(std::move(image));
  for (const TransferTensor& tensor : tensors) {
    request.destination.emplace_back(memory.get() + tensor.offset, static_cast<size_t>(tensor.bytes));
  }
  auto ended = std::make_shared<std::promise<absl::Status>>();
  request.on_done = [ended](const absl::StatusOr<EncodedImage>& result) { ended->set_value(result.status()); };
  PARVL_RETURN_IF_ERROR(engine.submit(std::move(request)).status());
  return with_context(ended->get_future().get(), "the first encoding");
}

}  // namespace parvl
