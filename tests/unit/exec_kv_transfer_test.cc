// A prompt computed by one engine, its answer by another: the same tokens as of one engine.
#include <gmock/gmock.h>

#include <set>

#include "parvl/media/json_schema.h"
#include "tests/unit/exec_given_fixture.h"

namespace parvl {
namespace {

using ::testing::HasSubstr;

// As a transfer engine would have it.
struct HeldRoom : KvRoom {
  explicit HeldRoom(std::vector<TransferTensor> layout) : tensors(std::move(layout)) {
    for (const TransferTensor& tensor : tensors) {
      memory.emplace_back(tensor.bytes);
      pieces.push_back(memory.back().span());
    }
  }
  std::vector<TransferTensor> tensors;
  std::vector<AlignedBytes> memory;
};

struct HeldKv : KvSource {
  HeldKv(int64_t count, std::shared_ptr<HeldRoom> there) : covered(count), room(std::move(there)) {}
  int64_t tokens() const override { return covered; }
  const std::vector<TransferTensor>& tensors() const override { return room->tensors; }
  absl::Status fetch(const Take& take) override {
    EXPECT_EQ(++fetches, 1);
    if (before) before();
    if (!status.ok()) return status;
    std::vector<const std::byte*> data;
    for (const AlignedBytes& memory : room->memory) data.push_back(memory.memory.get());
    take(data);
    return absl::OkStatus();
  }
  int64_t covered;
  std::shared_ptr<HeldRoom> room;
  absl::Status status;           // of every fetch
  std::function<void()> before;  // called in every fetch
  std::atomic<int> fetches = 0;
};

class KvTransferTest : public GivenFeaturesTest {
 protected:
  // A case, begun by an engine that gives its KV away.
  struct Begun {
    const Case* of = nullptr;
    std::vector<TokenId> tokens;  // so far
    std::string text;
    std::vector<TokenLogprob> logprobs;
    FinishReason finish = FinishReason::kNone;
    std::shared_ptr<HeldKv> kv;  // null: that was all
  };

  static std::shared_ptr<Pending> send(Engine& engine, const Case& c, EngineRequest request) {
    auto pending = std::make_shared<Pending>();
    if (!c.grammar.empty()) request.grammar = *engine.grammars().compile(c.grammar);
    if (request.prompt == nullptr) request.prompt = c.prompt;
    request.sampling = c.sampling;
    request.on_token = [pending](const TokenEvent& event) { pending->text += event.text; };
    request.on_end = [pending](const absl::StatusOr<GenerateResult>& result) {
      EXPECT_EQ(++pending->ends, 1);
      pending->end.set_value(result);
    };
    engine.submit(std::move(request));
    return pending;
  }

  // All at once; from the first `from` tokens of what each wants.
  static std::vector<Begun> begin(Engine& engine, const std::vector<Case>& cases, size_t from = 0) {
    std::vector<Begun> out;
    std::vector<std::shared_ptr<Pending>> pending;
    for (const Case& c : cases) {
      Begun one;
      one.of = &c;
      const size_t known = std::min(from, c.want.token_ids.size() - 1);
      one.tokens.assign(c.want.token_ids.begin(), c.want.token_ids.begin() + static_cast<std::ptrdiff_t>(known));
      const auto tokens = static_cast<int64_t>(c.prompt->ids.size() + known);
      auto room = std::make_shared<HeldRoom>(engine.kv_layout(tokens));
      one.kv = std::make_shared<HeldKv>(tokens, room);
      EngineRequest request;
      request.kv_room = room;
      request.generated = one.tokens;
      pending.push_back(send(engine, c, std::move(request)));
      out.push_back(std::move(one));
    }
    for (size_t i = 0; i < out.size(); ++i) take(pending[i]->end.get_future().get(), *pending[i], out[i]);
    return out;
  }

  static void take(const absl::StatusOr<GenerateResult>& result, const Pending& pending, Begun& out) {
    ASSERT_TRUE(result.ok()) << result.status();
    ASSERT_EQ(result->token_ids.size(), 1u);
    EXPECT_EQ(result->handed_over, result->finish == FinishReason::kNone);
    out.tokens.push_back(result->token_ids[0]);
    out.logprobs = result->logprobs;
    out.text = pending.text;
    out.finish = result->finish;
    if (!result->handed_over) out.kv = nullptr;
  }

  static std::shared_ptr<Pending> go_on(Engine& engine, const Begun& begun) {
    EngineRequest request;
    request.prompt = outlines(*begun.of->prompt);
    request.generated = begun.tokens;
    request.kv = begun.kv;
    return send(engine, *begun.of, std::move(request));
  }
  // Its images as an engine knows them that never sees them.
  static std::shared_ptr<const Prompt> outlines(const Prompt& prompt) {
    auto out = std::make_shared<Prompt>(prompt);
    for (auto& image : out->images) image = outline(*image);
    return out;
  }

  // Each equal to what was wanted, by the rule for two runs of a model.
  void expect_moved(Engine& engine, const std::vector<Begun>& all) {
    std::vector<std::shared_ptr<Pending>> pending;
    for (const Begun& begun : all) pending.push_back(begun.kv == nullptr ? nullptr : go_on(engine, begun));
    for (size_t i = 0; i < all.size(); ++i) {
      const Case& c = *all[i].of;
      const size_t from = all[i].tokens.size() - 1;
      GenerateResult got;
      if (pending[i] != nullptr) {
        const auto rest = pending[i]->end.get_future().get();
        ASSERT_TRUE(rest.ok()) << rest.status();
        got = *rest;
      }
      got.token_ids.insert(got.token_ids.begin(), all[i].tokens.back());
      got.logprobs.insert(got.logprobs.begin(), all[i].logprobs.begin(), all[i].logprobs.end());
      if (pending[i] == nullptr) got.finish = all[i].finish;
      expect_equal(got, c.want, from);
      if (from == 0 && pending[i] != nullptr && got.token_ids == c.want.token_ids) {
        EXPECT_EQ(all[i].text + pending[i]->text, c.want.text);
        ++whole_;
      }
    }
  }
  int64_t whole_ = 0;  // that came to the very same end

  static std::vector<std::string> families() { return {"llama", "qwen2", "qwen2_vl", "qwen2_5_vl"}; }
};

TEST_F(KvTransferTest, GivesWhatOneEngineGives) {
  for (const std::string& family : families()) {
    SCOPED_TRACE(family);
    const std::string dir = make_dir(family);
    const std::vector<Case> cases = make_cases(dir);
    EngineOptions chunks;
    chunks.max_seqs = 8;
    chunks.max_batched_tokens = 24;
    const auto prefill = load(dir, chunks);
    const auto decode = load(dir, llm_only());
    whole_ = 0;
    for (const size_t from : {size_t{0}, size_t{0}, size_t{7}}) expect_moved(*decode, begin(*prefill, cases, from));
    EXPECT_GE(whole_, static_cast<int64_t>(cases.size()));
    const EngineStats stats = decode->stats();
    // The second time all but what does not fill a block was there already.
    EXPECT_GT(stats.prefix_hits, 0);
    EXPECT_GT(stats.kv_fetched, 0);
    EXPECT_EQ(stats.kv_fetch_failures, 0);
    EXPECT_EQ(stats.encoder_queries, 0);  // it saw no image
    EXPECT_EQ(prefill->stats().handed_over, static_cast<int64_t>(3 * cases.size()));
    expect_nothing_held(*prefill);
    expect_nothing_held(*decode);
  }
}

TEST_F(KvTransferTest, HalfPrecisionIsMovedAsItIs) {
  const std::string dir = make_dir("qwen2");
  const std::vector<Case> cases = make_cases(dir);
  EngineOptions half;
  half.load.dtype = "bfloat16";
  const auto prefill = load(dir, half), decode = load(dir, half);
  EXPECT_EQ(prefill->kv_layout(17)[0].dtype, DType::kBFloat16);
  const std::vector<Begun> all = begin(*prefill, cases);
  for (const Begun& begun : all) {
    const auto want = send(*prefill, *begun.of, {})->end.get_future().get();
    ASSERT_TRUE(want.ok()) << want.status();
    EXPECT_EQ(begun.tokens[0], want->token_ids[0]);
    const auto got = go_on(*decode, begun)->end.get_future().get();
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_NEAR(got->logprobs[0].top[0].second, want->logprobs[1].top[0].second, 0.05);
  }
  EXPECT_EQ(decode->stats().kv_fetched, static_cast<int64_t>(cases.size()));
}

TEST_F(KvTransferTest, UnderPreemptionsPenaltiesStopsAndAGrammar) {
  const std::string dir = make_dir("qwen2");
  std::vector<Case> cases = make_cases(dir);
  const OrderedJson schema = *supported_schema(OrderedJson::parse(R"({"type": "array", "minItems": 2, "maxItems": 6,
      "items": {"type": "string", "maxLength": 8}})"),
                                               "schema");
  for (int i = 0; i < 12; ++i) {
    Case c = cases[static_cast<size_t>(i % 3)];
    c.sampling.temperature = 1;
    c.sampling.seed = static_cast<uint64_t>(100 + i);
    c.sampling.presence_penalty = 0.3;
    c.sampling.repetition_penalty = 1.2;
    c.sampling.max_tokens = 60;
    if (i % 4 == 0) c.sampling.stop = {c.want.text.substr(c.want.text.size() / 2, 2), "never this"};
    if (i % 4 == 1) c.grammar = grammar_source(json_format(schema));
    if (i % 4 == 2) c.sampling.max_tokens = 1;  // ends where it would be handed over
    cases.push_back(c);
  }
  const auto whole = load(dir, {}), prefill = load(dir, {});
  for (Case& c : cases) c.want = *send(*whole, c, {})->end.get_future().get();
  EngineOptions tight;
  tight.max_seqs = 12;
  tight.max_batched_tokens = 64;
  tight.prefix_caching = false;
  tight.kv_cache_bytes = 2 * 2 * 2 * 8 * 16 * 4 * (kMaxLen / 16 + 3);
  const auto decode = load(dir, tight);
  expect_moved(*decode, begin(*prefill, cases));
  EXPECT_GT(decode->stats().preemptions, 0);
  expect_nothing_held(*decode);
}

// Nothing came: text is computed here, images too where their features can be had, and else the request has to go back.
TEST_F(KvTransferTest, WhatDoesNotComeIsComputedOrSaysSo) {
  const std::string dir = make_dir("qwen2_vl");
  const std::vector<Case> cases = make_cases(dir);
  const auto prefill = load(dir, {}), decode = load(dir, llm_only());
  const auto encoder = load_encoder(dir);
  std::vector<Begun> all = begin(*prefill, cases);
  for (const Begun& begun : all) begun.kv->status = absl::UnavailableError("it is not there any more");
  std::vector<const Begun*> lost;
  for (const Begun& begun : all) {
    if (begun.of->prompt->images.empty()) {
      expect_moved(*decode, {begun});
      continue;
    }
    lost.push_back(&begun);
    const auto got = go_on(*decode, begun)->end.get_future().get();
    EXPECT_EQ(got.status().code(), absl::StatusCode::kUnavailable) << got.status();
  }
  // Nothing was encoded for those.
  EXPECT_EQ(decode->stats().encoder_busy_s, 0);
  EXPECT_EQ(decode->stats().work[static_cast<size_t>(WorkKind::kEncode)].launched, 0);
  EXPECT_EQ(decode->stats().fetched, 0);
  for (const Begun* begun : lost) {
    const Given given = give(*encoder, *begun->of->prompt);
    EngineRequest request;
    request.prompt = given.prompt;
    request.encoded = given.sources;
    request.generated = begun->tokens;
    auto kv = std::make_shared<HeldKv>(begun->kv->covered, begun->kv->room);
    kv->status = absl::DataLossError("it is damaged");
    request.kv = kv;
    const auto again = send(*decode, *begun->of, std::move(request))->end.get_future().get();
    ASSERT_TRUE(again.ok()) << again.status();
    expect_equal(*again, begun->of->want, 1);
  }
  EXPECT_FALSE(lost.empty());
  EXPECT_GE(decode->stats().kv_fetch_failures, static_cast<int64_t>(cases.size()));
  expect_nothing_held(*decode);
}

TEST_F(KvTransferTest, ACancelledFetchHoldsItsBlocksUntilItIsOver) {
  const std::string dir = make_dir("qwen2");
  const std::vector<Case> cases = make_cases(dir);
  const auto prefill = load(dir, {}), decode = load(dir, {});
  const std::vector<Begun> all = begin(*prefill, cases);
  std::promise<void> begun, go;
  all[0].kv->before = [&] {
    begun.set_value();
    go.get_future().wait();
  };
  auto pending = std::make_shared<Pending>();
  EngineRequest request;
  request.prompt = cases[0].prompt;
  request.generated = all[0].tokens;
  request.kv = all[0].kv;
  request.sampling = cases[0].sampling;
  request.on_token = [](const TokenEvent&) { ADD_FAILURE() << "a token of a request that was cancelled"; };
  request.on_end = [pending](const auto& result) { pending->end.set_value(result); };
  const RequestId id = decode->submit(std::move(request));
  begun.get_future().wait();
  decode->cancel(id);
  EXPECT_EQ(pending->end.get_future().get()->finish, FinishReason::kNone);
  EXPECT_GT(decode->stats().blocks_used, 0);
  // Others go on meanwhile.
  const auto other = send(*decode, cases[1], {})->end.get_future().get();
  ASSERT_TRUE(other.ok());
  expect_equal(*other, cases[1].want);
  go.set_value();
  expect_nothing_held(*decode);
  EXPECT_EQ(decode->stats().kv_fetched, 0);
}

TEST_F(KvTransferTest, RefusesWhatIsNotItsOwn) {
  const std::string dir = make_dir("qwen2");
  const std::vector<Case> cases = make_cases(dir);
  const auto engine = load(dir, {});
  const auto tokens = static_cast<int64_t>(cases[0].prompt->ids.size());
  const auto refusal = [&](EngineRequest request) {
    return std::string(send(*engine, cases[0], std::move(request))->end.get_future().get().status().message());
  };
  EngineRequest request;
  request.kv_room = std::make_shared<HeldRoom>(engine->kv_layout(tokens + 16));
  EXPECT_THAT(refusal(request), HasSubstr("the room for its keys and values is not of their size"));
  request = {};
  request.kv = std::make_shared<HeldKv>(1, std::make_shared<HeldRoom>(engine->kv_layout(17)));
  EXPECT_THAT(refusal(request), HasSubstr("are not of this model"));
  request.kv = std::make_shared<HeldKv>(tokens, std::make_shared<HeldRoom>(engine->kv_layout(tokens)));
  EXPECT_THAT(refusal(request), HasSubstr("the last is computed here"));
  expect_nothing_held(*engine);
}

}  // namespace
}  // namespace parvl
