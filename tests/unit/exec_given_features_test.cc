// An encode engine and an engine without an encoder, against one engine that holds all: the same answers however
// requests are cut, cached, preempted or taken up.
#include <gmock/gmock.h>

#include "parvl/comm/transfer/transfer_sink.h"
#include "parvl/comm/transfer/transfer_source.h"
#include "parvl/sched/record.h"
#include "tests/unit/exec_given_fixture.h"

namespace parvl {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class GivenFamilyTest : public GivenFeaturesTest, public testing::WithParamInterface<const char*> {};

// One request at a time, its images there already, so that the same kernels run over the same rows.
TEST_P(GivenFamilyTest, EqualsOneEngineToTheBit) {
  const std::string dir = make_dir(GetParam());
  const std::vector<Case> cases = make_cases(dir);
  const auto encoder = load_encoder(dir);
  const std::vector<Given> given = give_all(*encoder, cases);
  for (const int64_t chunk : {5, 16, 2048}) {  // an image has 20 tokens
    SCOPED_TRACE(chunk);
    EngineOptions options;
    options.max_batched_tokens = chunk;
    options.max_seqs = 1;
    options.prefix_caching = false;
    const auto whole = load(dir, options), llm = load(dir, llm_only(options));
    for (const bool warm : {false, true}) {
      for (size_t i = 0; i < cases.size(); ++i) {
        SCOPED_TRACE(i);
        const auto pending = std::make_shared<Pending>();
        submit(*whole, cases[i].prompt, cases[i].sampling, pending);
        const auto want = pending->end.get_future().get(), got = run(*llm, given[i], cases[i].sampling);
        ASSERT_TRUE(want.ok() && got.ok()) << want.status() << got.status();
        if (warm && test_device() == "cpu") expect_same_bits(*got, *want);
        expect_equal(*got, *want);
        expect_equal(*got, cases[i].want);
      }
    }
    EXPECT_EQ(llm->stats().encoder_busy_s, 0);
    EXPECT_EQ(llm->stats().fetched, different(given));
  }
}

TEST_P(GivenFamilyTest, EqualsTheGeneratorHoweverItIsCutAndBatched) {
  const std::string dir = make_dir(GetParam());
  const std::vector<Case> cases = make_cases(dir);
  const auto encoder = load_encoder(dir);
  for (const int64_t chunk : {16, 2048}) {
    for (const bool cache : {false, true}) {
      SCOPED_TRACE(testing::Message() << chunk << " tokens a step, cache " << cache);
      const std::vector<Given> given = give_all(*encoder, cases);
      EngineOptions options;
      options.max_batched_tokens = chunk;
      options.max_seqs = 12;
      options.prefix_caching = cache;
      const auto engine = load(dir, llm_only(options));
      run_given(*engine, cases, given, 2);
      EXPECT_EQ(fetches(given), different(given));  // each image once, whoever asks for it
      run_given(*engine, cases, given, 1);
      EXPECT_EQ(fetches(given), different(given));
      expect_nothing_held(*engine);
      EXPECT_EQ(engine->stats().prefix_hits > 0, cache);
      EXPECT_GT(engine->stats().encoder_hits, 0);
      EXPECT_EQ(engine->stats().fetched, different(given));
      EXPECT_GT(engine->stats().fetch_busy_s, 0);
      EXPECT_EQ(engine->stats().encoder_bytes_held, 0);
      EXPECT_EQ(engine->stats().pending_tokens, 0);
      EXPECT_EQ(engine->stats().free_kv_tokens, engine->kv_tokens());
    }
  }
}

TEST_P(GivenFamilyTest, UnderPreemptionAndWithASmallEncoderCacheItIsFetchedAgain) {
  const std::string dir = make_dir(GetParam());
  const std::vector<Case> cases = make_cases(dir);
  const auto encoder = load_encoder(dir);
  const std::vector<Given> given = give_all(*encoder, cases);
  EngineOptions options;
  options.max_seqs = 12;
  options.max_batched_tokens = 64;
  options.prefix_caching = false;
  options.kv_cache_bytes = 2 * 2 * 2 * 8 * 16 * 4 * (kMaxLen / 16 + 3);  // hardly more than one sequence needs
  options.encoder_cache_bytes = 2 * 20 * 32 * 4;                         // two of three images
  const auto engine = load(dir, llm_only(options));
  run_given(*engine, cases, given, 4);
  expect_nothing_held(*engine);
  EXPECT_GT(engine->stats().preemptions, 0);
  EXPECT_GT(fetches(given), different(given));
}

TEST_P(GivenFamilyTest, AnAnswerGoesOnFromAnyOfItsTokens) {
  const std::string dir = make_dir(GetParam());
  const std::vector<Case> cases = make_cases(dir);
  const auto encoder = load_encoder(dir);
  const auto engine = load(dir, llm_only());
  for (const size_t i : {1, 3}) {
    const Case& c = cases[i];
    const Given given = give(*encoder, *c.prompt);
    ASSERT_FALSE(given.sources.empty());
    for (size_t from = 0; from < c.want.token_ids.size(); from += 7) {
      SCOPED_TRACE(from);
      const auto result = run(*engine, given, c.sampling, {c.want.token_ids.begin(), c.want.token_ids.begin() + from});
      ASSERT_TRUE(result.ok()) << result.status();
      expect_equal(*result, c.want, from);
    }
  }
}

// An engine that holds all may be given some features, and encodes the rest.
TEST_P(GivenFamilyTest, SomeImagesAreGivenAndSomeEncodedHere) {
  const std::string dir = make_dir(GetParam());
  const std::vector<Case> cases = make_cases(dir);
  const auto encoder = load_encoder(dir);
  const auto engine = load(dir, {});
  const Case& c = cases[3];  // two images
  ASSERT_EQ(c.prompt->images.size(), 2u);
  for (const size_t mine : {0, 1}) {
    Given given = give(*encoder, *c.prompt);
    auto prompt = std::make_shared<Prompt>(*given.prompt);
    prompt->images[mine] = c.prompt->images[mine];
    given.prompt = prompt;
    given.sources[mine] = nullptr;
    if (mine == 1) given.sources.pop_back();  // as far as it reaches
    const auto result = run(*engine, given, c.sampling);
    ASSERT_TRUE(result.ok()) << result.status();
    expect_equal(*result, c.want);
    EXPECT_EQ(given.held[mine]->fetches, 0);
    EXPECT_EQ(given.held[1 - mine]->fetches, 1);
  }
  EXPECT_EQ(engine->stats().fetched, 2);
  EXPECT_GT(engine->stats().encoder_busy_s, 0);
}

INSTANTIATE_TEST_SUITE_P(Families, GivenFamilyTest, testing::Values("qwen2_vl", "qwen2_5_vl"));

TEST_F(GivenFeaturesTest, TheExampleModel) {
  const std::string dir = std::string(PARVL_SOURCE_DIR) + "/examples/easy_vqa/model";
  const std::vector<Case> cases = make_cases(dir, "float32");
  EngineOptions options;
  options.load.dtype = "float32";
  options.max_batched_tokens = 100;
  const auto encoder = load_encoder(dir, options);
  const std::vector<Given> given = give_all(*encoder, cases);
  const auto engine = load(dir, llm_only(options));
  run_given(*engine, cases, given, 3);
  EXPECT_EQ(fetches(given), different(given));
  expect_nothing_held(*engine);
}

// Encoder output that a transfer source holds.
struct PulledSource : EncodedSource {
  PulledSource(TransferSink& from, TransferHandle what) : sink(from), handle(std::move(what)) {}
  const std::vector<TransferTensor>& tensors() const override { return handle.tensors; }
  absl::Status fetch(absl::Span<const absl::Span<std::byte>> out) override {
    return sink.pull_into(handle, out, /*timeout_s=*/10).status();
  }
  TransferSink& sink;
  const TransferHandle handle;
};

// The encode engine writes into the transfer's memory, and the sink into the engine's tensor.
TEST_F(GivenFeaturesTest, ThroughATransfer) {
  const std::string dir = make_dir("qwen2_5_vl");
  const std::vector<Case> cases = make_cases(dir);
  const auto encoder = load_encoder(dir);
  const std::string token = "a token of this test's run";
  TransferSourceOptions sending;
  sending.name = "encode-0";
  sending.token = token;
  sending.clock = &clock();
  sending.arena_bytes = 1 << 20;
  sending.tcp_listen = "127.0.0.1:0";
  const auto source = *TransferSource::start(sending);
  for (const TransferLane lane : {TransferLane::kSharedMemory, TransferLane::kTcp}) {
    SCOPED_TRACE(to_string(lane));
    const auto sink = *TransferSink::start({.name = "llm-0", .token = token, .clock = &clock(), .only = lane});
    const auto engine = load(dir, llm_only());
    TransferId last;
    for (const Case& c : cases) {
      Given given;
      auto prompt = std::make_shared<Prompt>(*c.prompt);
      for (auto& image : prompt->images) {
        TransferRegion region = *source->reserve(*encoder->layout_of(*image));
        std::promise<absl::Status> end;
        const absl::Span<std::byte> memory(region.data(0), static_cast<size_t>(region.tensors()[0].bytes));
        ASSERT_TRUE(encoder->submit({image, {memory}, [&](const auto& done) { end.set_value(done.status()); }}).ok());
        ASSERT_TRUE(end.get_future().get().ok());
        const TransferHandle handle = source->publish(std::move(region), {});
        last = handle.item;
        given.sources.push_back(std::make_shared<PulledSource>(*sink, *TransferHandle::decode(handle.encode())));
        image = outline(*image);
      }
      given.prompt = prompt;
      const auto result = run(*engine, given, c.sampling);
      ASSERT_TRUE(result.ok()) << result.status();
      expect_equal(*result, c.want);
      if (given.sources.empty()) continue;
      // What is gone is missed by who has it not yet.
      source->drop(last);
      EXPECT_TRUE(run(*engine, given, c.sampling).ok());
      const auto other = load(dir, llm_only());
      EXPECT_TRUE(absl::IsUnavailable(run(*other, given, c.sampling).status()));
    }
    EXPECT_EQ(engine->stats().fetched, 3);
  }
}

TEST_F(GivenFeaturesTest, AModelWithoutImagesServesAsAnLlmAlone) {
  const std::string dir = make_dir("qwen2");
  const auto engine = load(dir, llm_only());
  run_all(*engine, make_cases(dir), 1);
}

TEST_F(GivenFeaturesTest, ARecordOfItReplays) {
  const std::string dir = make_dir("qwen2_vl");
  const std::vector<Case> cases = make_cases(dir);
  const auto encoder = load_encoder(dir);
  const std::vector<Given> given = give_all(*encoder, cases);
  EngineOptions options;
  options.record_path = root_ + "/record";
  options.max_batched_tokens = 64;
  auto engine = load(dir, llm_only(options));
  run_given(*engine, cases, given, 2);
  engine.reset();
  const std::string record = *read_file(options.record_path);
  EXPECT_THAT(record, AllOf(HasSubstr("\"cost\":0"), HasSubstr("commit_encode")));
  const auto report = replay(record);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->differing_line, 0) << report->recorded << "\n" << report->replayed;
  EXPECT_GT(report->decisions, 10);
}

}  // namespace
}  // namespace parvl
