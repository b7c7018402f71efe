#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "parvl/serve/pools/output_cache.h"
#include "parvl/serve/pools/prefix_chain.h"
#include "parvl/serve/pools/wire.h"

namespace parvl {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::shared_ptr<const ProcessedImage> image(uint8_t key, int side = 4) {
  auto out = std::make_shared<ProcessedImage>();
  out->grid_t = 1;
  out->grid_h = out->grid_w = side;
  out->patch_floats = 6;
  out->merge_size = 2;
  out->key.fill(key);
  return out;
}

EngineRequest whole_request() {
  auto prompt = std::make_shared<Prompt>();
  prompt->ids = {1, 9, 9, 9, 9, 2, 9, 9, 9, 9};
  prompt->images = {image(1), image(2)};
  prompt->media = {{1, 1, 4}, {0, 6, 4}};
  EngineRequest out;
  out.prompt = prompt;
  SamplingParams& s = out.sampling;
  s.temperature = 0.7;
  s.top_p = 0.9;
  s.top_k = 40;
  s.min_p = 0.05;
  s.presence_penalty = 0.1;
  s.frequency_penalty = -0.2;
  s.repetition_penalty = 1.1;
  s.logit_bias = {{3, -100}, {7, 2.5}};
  s.seed = 0xfedcba9876543210;
  s.max_tokens = 17;
  s.min_tokens = 2;
  s.stop = {"\xff\0x", "b"};
  s.stop[0] = std::string("\xff\0x", 3);
  s.stop_token_ids = {4, 5};
  s.ignore_eos = true;
  s.logprobs = true;
  s.top_logprobs = 3;
  out.generated = {11, 12};
  out.priority = -3;
  out.cache_salt = std::string("a\0b", 3);
  return out;
}

TEST(PoolsWire, ARequestComesOutAsItWentIn) {
  const EngineRequest in = whole_request();
  wire::Generate message, copy;
  write_request(in, {{"pixels", ""}, {"", "output"}}, message);
  ASSERT_TRUE(copy.ParseFromString(message.SerializeAsString()));
  EXPECT_EQ(copy.images(0).pixels_at(), "pixels");
  EXPECT_EQ(copy.images(1).output_at(), "output");
  const auto out = read_request(copy);
  ASSERT_TRUE(out.ok()) << out.status();
  EXPECT_EQ(out->prompt->ids, in.prompt->ids);
  ASSERT_EQ(out->prompt->media.size(), 2u);
  EXPECT_EQ(out->prompt->media[0].image_index, 1);
  EXPECT_EQ(out->prompt->media[1].begin, 6);
  EXPECT_EQ(out->prompt->images[1]->key, in.prompt->images[1]->key);
  EXPECT_TRUE(out->prompt->images[0]->patches.empty());
  EXPECT_EQ(out->generated, in.generated);
  EXPECT_EQ(out->priority, in.priority);
  EXPECT_EQ(out->cache_salt, in.cache_salt);
  // Every field of the sampling: written again, it is the same message.
  wire::Generate again;
  write_request(*out, {{"pixels", ""}, {"", "output"}}, again);
  EXPECT_EQ(again.sampling().seed(), in.sampling.seed);
  EXPECT_EQ(again.sampling().stop(0), in.sampling.stop[0]);
  EXPECT_EQ(again.DebugString(), message.DebugString());
}

TEST(PoolsWire, NumbersThatDoNotFitTogetherAreRefused) {
  const auto with = [](const std::function<void(wire::Generate&)>& change) {
    wire::Generate message;
    write_request(whole_request(), {{"", "a"}, {"", "b"}}, message);
    change(message);
    return std::string(read_request(message).status().message());
  };
  EXPECT_EQ(with([](wire::Generate&) {}), "");
  EXPECT_THAT(with([](auto& m) { m.mutable_images(0)->set_grid_h(1 << 30); }), HasSubstr("a side of"));
  EXPECT_THAT(with([](auto& m) { m.mutable_images(0)->set_grid_w(5); }), HasSubstr("cannot be merged"));
  EXPECT_THAT(with([](auto& m) { m.mutable_images(0)->set_merge_size(0); }), HasSubstr("cannot be merged"));
  EXPECT_THAT(with([](auto& m) { m.mutable_images(0)->set_key("short"); }), HasSubstr("key of the wrong length"));
  EXPECT_THAT(with([](auto& m) { m.mutable_media(0)->set_image(2); }), HasSubstr("makes no sense"));
  EXPECT_THAT(with([](auto& m) { m.mutable_media(0)->set_begin(-1); }), HasSubstr("makes no sense"));
  EXPECT_THAT(with([](auto& m) { m.mutable_media(1)->set_begin(INT64_MAX - 1); }), HasSubstr("makes no sense"));
  EXPECT_THAT(with([](auto& m) { m.mutable_media(1)->set_begin(3); }), HasSubstr("makes no sense"));
  EXPECT_THAT(with([](auto& m) { m.mutable_media(1)->set_length(3); }), HasSubstr("makes no sense"));
}

TEST(PoolsWire, TokensResultsFailuresAndCountsComeOutAsTheyWentIn) {
  TokenEvent event{42, "t\xc3\xa4", {42, -0.5f, {{42, -0.5f}, {7, -1.25f}}}, FinishReason::kLength};
  wire::Token token;
  write_token(event, token);
  const TokenEvent back = read_token(token);
  EXPECT_EQ(back.token_id, 42);
  EXPECT_EQ(back.text, event.text);
  EXPECT_EQ(back.logprob.logprob, -0.5f);
  EXPECT_EQ(back.logprob.top, event.logprob.top);
  EXPECT_EQ(back.finish, FinishReason::kLength);
  token.set_finish(99);
  EXPECT_EQ(read_token(token).finish, FinishReason::kNone);

  wire::Ended ended;
  write_result(absl::InvalidArgumentError("no"), ended);
  EXPECT_EQ(read_failure(ended.failure()), absl::InvalidArgumentError("no"));
  write_result(GenerateResult{}, ended);
  EXPECT_TRUE(read_failure(ended.failure()).ok());

  EngineStats stats;
  stats.running = 1;
  stats.free_kv_tokens = 2;
  stats.encoder_bytes_held = 3;
  stats.backbone_busy_s = 4.5;
  stats.fetched = 5;
  stats.kv_fetched = 8;
  stats.kv_fetched_tokens = 9;
  stats.kv_fetch_failures = 10;
  stats.handed_over = 11;
  stats.work[1] = {6, 7};
  wire::Counts counts, again;
  write_stats(stats, counts);
  write_stats(read_stats(counts), again);
  EXPECT_EQ(again.DebugString(), counts.DebugString());
  EXPECT_EQ(read_stats(counts).work[1].launched, 7);
  EXPECT_EQ(read_stats(counts).kv_fetch_failures, 10);
  EXPECT_EQ(read_stats(counts).handed_over, 11);

  EngineOptions options;
  options.load.modules = {"llm_backbone"};
  options.load.dtype = "float32";
  options.load.memory_utilization = 0.25;
  options.max_seqs = 3;
  options.step_s = 0.05;
  options.prefix_caching = false;
  wire::Assign assign, twice;
  write_options(options, assign);
  write_options(read_options(assign), twice);
  EXPECT_EQ(twice.DebugString(), assign.DebugString());
  EXPECT_EQ(read_options(assign).load.memory_utilization, 0.25);
  EXPECT_FALSE(read_options(assign).prefix_caching);
  EXPECT_EQ(read_options(assign).step_s, 0.05);
}

// What passes through the gateway says where keys and values lie, however many there are.
TEST(PoolsWire, KeysAndValuesDoNotPassThroughTheGateway) {
  const auto size_of = [](int64_t tokens) {
    TransferHandle handle{"instance-1", 3, TransferId{77}, "a-host", "an-address"};
    for (const char* name : {"keys", "values"}) {
      handle.tensors.push_back({name, DType::kBFloat16, {28, tokens / 16, 4, 16, 128}});
    }
    EXPECT_GT(*place_tensors(handle.tensors), tokens * 50'000);
    wire::Ended ended;
    ended.set_kv(handle.encode());
    return ended.ByteSizeLong();
  };
  EXPECT_LT(size_of(1 << 17), 512u);
  EXPECT_LE(size_of(1 << 17), size_of(1 << 10) + 16);
}

TEST(PrefixChain, DiffersFromWhereThePromptsDo) {
  Prompt a;
  a.ids.assign(64, 5);
  a.images = {image(1), image(2)};
  a.media = {{0, 20, 4}};
  Prompt b = a, c = a;
  b.media[0].image_index = 1;
  c.ids[40] = 6;
  const auto chain = prefix_chain(a, "", 16);
  ASSERT_EQ(chain.size(), 4u);
  EXPECT_EQ(prefix_chain(a, "", 16), chain);
  const auto equal_blocks = [&](const std::vector<uint64_t>& other) {
    size_t i = 0;
    while (i < other.size() && other[i] == chain[i]) ++i;
    return i;
  };
  EXPECT_EQ(equal_blocks(prefix_chain(b, "", 16)), 1u) << "another image in the second block";
  EXPECT_EQ(equal_blocks(prefix_chain(c, "", 16)), 2u);
  EXPECT_EQ(equal_blocks(prefix_chain(a, "salt", 16)), 0u);
  a.ids.resize(63);
  EXPECT_EQ(prefix_chain(a, "", 16).size(), 3u) << "whole blocks alone";
}

TEST(OutputCache, KeepsWhatIsUsedAndGivesUpTheLeastRecentlyUsed) {
  OutputCache cache;
  const OutputCache::Key a = image(1)->key, b = image(2)->key;
  EXPECT_FALSE(cache.use(a).has_value());
  EXPECT_TRUE(cache.add(a, TransferId{1}, "A"));
  EXPECT_FALSE(cache.add(a, TransferId{2}, "A again"));
  EXPECT_TRUE(cache.add(b, TransferId{3}, "B"));
  EXPECT_EQ(cache.evict(), std::nullopt) << "both are used";
  EXPECT_EQ(cache.use(a)->handle, "A");
  EXPECT_FALSE(cache.let_go(TransferId{1}, false));
  EXPECT_EQ(cache.evict(), std::nullopt) << "one of its two users has it still";
  EXPECT_FALSE(cache.let_go(TransferId{3}, false));
  EXPECT_FALSE(cache.let_go(TransferId{1}, false));
  EXPECT_EQ(cache.use(b)->handle, "B");
  EXPECT_FALSE(cache.let_go(TransferId{3}, false));
  EXPECT_EQ(cache.evict(), TransferId{1}) << "b was used after it";
  EXPECT_EQ(cache.evict(), TransferId{3});
  EXPECT_EQ(cache.size(), 0u);
}

TEST(OutputCache, WhatIsLostIsMadeAgainAndGoesWithItsLastUser) {
  OutputCache cache;
  const OutputCache::Key a = image(1)->key;
  EXPECT_TRUE(cache.add(a, TransferId{1}, "A"));
  EXPECT_TRUE(cache.use(a).has_value());
  EXPECT_FALSE(cache.let_go(TransferId{1}, true)) << "another one may have it yet";
  EXPECT_FALSE(cache.use(a).has_value()) << "nobody new is given it";
  EXPECT_TRUE(cache.add(a, TransferId{2}, "A again"));
  EXPECT_TRUE(cache.let_go(TransferId{1}, false));
  EXPECT_EQ(cache.use(a)->item, TransferId{2}) << "of the same image, and whole";
  EXPECT_FALSE(cache.let_go(TransferId{2}, false));
  EXPECT_FALSE(cache.let_go(TransferId{2}, false));
  EXPECT_EQ(cache.evict(), TransferId{2});
  EXPECT_EQ(cache.size(), 0u);
}

}  // namespace
}  // namespace parvl
