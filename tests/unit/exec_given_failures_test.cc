// Requests whose images were encoded elsewhere, when that goes wrong: what does not come, is not as it should be, or is
// not wanted any more.
#include <gmock/gmock.h>

#include "tests/unit/exec_given_fixture.h"

namespace parvl {
namespace {

using testing::HasSubstr;

TEST_F(GivenFeaturesTest, WhoseFeaturesDoNotComeEndsWithThatAndOthersGoOn) {
  const std::string dir = make_dir("qwen2_vl");
  const std::vector<Case> cases = make_cases(dir);
  const auto encoder = load_encoder(dir);
  const std::vector<Given> given = give_all(*encoder, cases);
  Given lost = give(*encoder, chat(*PromptBuilder::load(dir).value(), "see", "it", {}));
  const auto engine = load(dir, llm_only());
  const auto prompts = *PromptBuilder::load(dir);
  std::vector<std::shared_ptr<Pending>> ends;
  for (int i = 0; i < 4; ++i) {
    lost = give(*encoder, chat(*prompts, "see", "it", {image(*prompts, 20, 28, 50 + i)}));
    // To the request it is all the same.
    lost.held[0]->status = i % 2 == 0 ? absl::UnavailableError("the encoder has gone")
                                      : absl::NotFoundError("of what the encoder has gone");
    ends.push_back(start(*engine, lost, cases[0].sampling));
    run_given(*engine, cases, given, 1);
  }
  for (const auto& end : ends) {
    const absl::Status status = end->end.get_future().get().status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(std::string(status.message()), HasSubstr("the encoder has gone"));
  }
  expect_nothing_held(*engine);
  EXPECT_EQ(engine->stats().fetched, different(given));
  // Elsewhere it is there.
  lost.held[0]->status = absl::OkStatus();
  EXPECT_TRUE(run(*engine, lost, cases[0].sampling).ok());
}

TEST_F(GivenFeaturesTest, WhatIsNotThisModelsOutputIsRefusedBeforeItIsFetched) {
  const std::string dir = make_dir("qwen2_vl");
  const auto encoder = load_encoder(dir);
  const auto engine = load(dir, llm_only());
  const Prompt prompt = chat(engine->prompts(), "see", "it", {image(engine->prompts(), 20, 28, 1)});
  SamplingParams greedy;
  greedy.temperature = 0;
  greedy.max_tokens = 3;
  const auto refusal = [&](const std::function<void(std::vector<TransferTensor>&)>& change) {
    Given given = give(*encoder, prompt);
    change(given.held[0]->what);
    const absl::Status status = run(*engine, given, greedy).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
    EXPECT_EQ(given.fetches(), 0);
    return std::string(status.message());
  };
  EXPECT_THAT(refusal([](std::vector<TransferTensor>& t) { t[0].shape[0] = 21; }),
              testing::StrEq(
                  "image 1: its encoder output is visual: float32 [21, 32] of 2560 bytes, and this model takes visual: "
                  "float32 [20, 32] of 2560 bytes"));
  EXPECT_THAT(refusal([](std::vector<TransferTensor>& t) { t[0].dtype = DType::kBFloat16; }),
              HasSubstr("bfloat16 [20, 32]"));
  EXPECT_THAT(refusal([](std::vector<TransferTensor>& t) { t[0].name = "audio"; }), HasSubstr("audio: float32"));
  EXPECT_THAT(refusal([](std::vector<TransferTensor>& t) { t.push_back(t[0]); }),
              HasSubstr("visual: float32 [20, 32] of 2560 bytes, visual: float32 [20, 32] of 2560 bytes, and"));
  refusal([](std::vector<TransferTensor>& t) { t.clear(); });
  refusal([](std::vector<TransferTensor>& t) { --t[0].bytes; });
  expect_nothing_held(*engine);
}

TEST_F(GivenFeaturesTest, RefusesImagesThatItCannotHave) {
  const std::string dir = make_dir("qwen2_vl");
  const auto encoder = load_encoder(dir);
  const auto llm = load(dir, llm_only()), whole = load(dir, {});
  const Prompt prompt =
      chat(llm->prompts(), "see", "it", {image(llm->prompts(), 20, 28, 1), image(llm->prompts(), 20, 28, 2)});
  const auto refusal = [&](Engine& engine, const std::function<void(Given&, Prompt&)>& change) {
    Given given = give(*encoder, prompt);
    auto changed = std::make_shared<Prompt>(*given.prompt);
    change(given, *changed);
    given.prompt = changed;
    SamplingParams greedy;
    greedy.temperature = 0;
    greedy.max_tokens = 3;
    const absl::Status status = run(engine, given, greedy).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_EQ(given.fetches(), 0);
    return std::string(status.message());
  };
  const auto drop = [](Given& given, Prompt&) { given.sources[1] = nullptr; };
  EXPECT_EQ(refusal(*llm, drop), "image 2: it has no encoder output, and this engine holds no vision encoder");
  EXPECT_EQ(refusal(*llm,
                    [&](Given& given, Prompt& changed) {
                      given.sources.clear();
                      changed.images = prompt.images;  // pixels do not help it
                    }),
            "image 1: it has no encoder output, and this engine holds no vision encoder");
  EXPECT_EQ(refusal(*whole, drop), "image 2: it has neither patches nor encoder output");
  const auto change_image = [](const std::function<void(ProcessedImage&)>& change) {
    return [change](Given&, Prompt& changed) {
      auto image = std::make_shared<ProcessedImage>(*changed.images[0]);
      change(*image);
      changed.images[0] = image;
    };
  };
  EXPECT_THAT(refusal(*llm, change_image([](ProcessedImage& image) { image.key = {}; })), HasSubstr("nor a key"));
  EXPECT_THAT(refusal(*llm, change_image([](ProcessedImage& image) {
                image.patches = {1, 2};
              })),
              HasSubstr("patches have 2 values"));
  EXPECT_THAT(refusal(*llm, change_image([](ProcessedImage& image) { image.grid_w = 7; })),
              HasSubstr("cannot be joined"));
  EXPECT_THAT(refusal(*llm, [](Given&, Prompt& changed) { --changed.media[1].length; }),
              HasSubstr("image 2: it has 20 tokens and stands on 19 placeholders"));
  EXPECT_THAT(refusal(*llm, [](Given&, Prompt& changed) { changed.media[1].begin = changed.media[0].begin; }),
              HasSubstr("not in the prompt behind"));
  EXPECT_THAT(refusal(*llm, [](Given&, Prompt& changed) { changed.media[1].begin += 1000; }),
              HasSubstr("not in the prompt behind"));
  EXPECT_THAT(refusal(*llm, [](Given&, Prompt& changed) { changed.media[1].image_index = 2; }), HasSubstr("not there"));
  EXPECT_THAT(refusal(*llm, [](Given&, Prompt& changed) { changed.images[1] = nullptr; }), HasSubstr("not there"));
  expect_nothing_held(*llm);
}

TEST_F(GivenFeaturesTest, ARequestThatIsCancelledWhileItsFeaturesCome) {
  const std::string dir = make_dir("qwen2_5_vl");
  const std::vector<Case> cases = make_cases(dir);
  const auto encoder = load_encoder(dir);
  const auto engine = load(dir, llm_only());
  Given given = give(*encoder, *cases[1].prompt);
  std::promise<void> began, go;
  const std::shared_future<void> gone = go.get_future().share();
  given.held[0]->before = [&, first = true]() mutable {
    if (std::exchange(first, false)) began.set_value();
    gone.wait();
  };
  RequestId id;
  const auto pending = start(*engine, given, cases[1].sampling, {}, &id);
  began.get_future().wait();
  engine->cancel(id);
  const auto result = pending->end.get_future().get();  // at once, the fetch goes on
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->finish, FinishReason::kNone);
  EXPECT_TRUE(result->token_ids.empty());
  const std::weak_ptr<HeldSource> alive = given.held[0];
  const Given again = give(*encoder, *cases[1].prompt);
  given = {};
  EXPECT_FALSE(alive.expired());  // it is being used
  const auto second = start(*engine, again, cases[1].sampling);
  go.set_value();
  const auto answer = second->end.get_future().get();
  ASSERT_TRUE(answer.ok()) << answer.status();
  expect_equal(*answer, cases[1].want);
  EXPECT_EQ(again.fetches(), 0);  // what came for the first is its too
  expect_nothing_held(*engine);
  EXPECT_TRUE(alive.expired());
}

TEST_F(GivenFeaturesTest, StoppingWaitsForTheFetchThatRunsAndEndsTheRest) {
  const std::string dir = make_dir("qwen2_vl");
  const auto encoder = load_encoder(dir);
  auto engine = load(dir, llm_only());
  std::vector<std::shared_ptr<Pending>> all;
  std::promise<void> began;
  int fetched = 0;
  for (int i = 0; i < 5; ++i) {
    const Given given = give(*encoder, chat(engine->prompts(), "see", "it", {image(engine->prompts(), 20, 28, i + 1)}));
    given.held[0]->before = [&] {
      if (fetched++ == 0) began.set_value();
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
    };
    all.push_back(start(*engine, given, {}));
  }
  began.get_future().wait();
  engine.reset();
  for (const auto& pending : all) EXPECT_EQ(pending->ends, 1);
  EXPECT_LT(fetched, 5);
}

}  // namespace
}  // namespace parvl
