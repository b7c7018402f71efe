// For tests of the gateway's engine: requests to instances of tests/unit/pools_fixture.h.
#pragma once

#include <gtest/gtest.h>

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "parvl/base/fingerprint.h"
#include "parvl/serve/pools/fleet_engine.h"
#include "tests/unit/pools_fixture.h"

namespace parvl {

struct Client {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<TokenId> tokens;
  std::string text;
  std::optional<absl::StatusOr<GenerateResult>> end;
  int ends = 0;

  bool wait(const std::function<bool()>& condition) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, std::chrono::seconds(30), condition);
  }
  bool has(size_t count) {
    return wait([&] { return tokens.size() >= count; });
  }
  bool over() {
    return wait([&] { return end.has_value(); });
  }
};

class FleetEngineTest : public testing::Test {
 protected:
  FleetEngineTest() { write_model_folder(folder_.path()); }

  absl::Status start(int64_t instances) { return start({{.name = "llm-pool", .instances = instances}}); }

  // One encoder, and two that may take it on.
  absl::Status start_apart() {
    return start({{.name = "encoder-pool", .encodes = true, .generates = false},
                  {.name = "llm-pool", .instances = 2, .encodes = false, .generates = true}});
  }

  // One that begins answers, and two that go on with them.
  absl::Status start_halves() {
    feature_bytes_ = 1;  // so that there is room for as few prompts as can be
    return start({{.name = "prefill-pool", .hands_over = true},
                  {.name = "decode-pool", .instances = 2, .encodes = false, .generates = false, .takes_over = true}});
  }

  absl::Status start(std::vector<FleetPool> pools) {
    FleetOptions options;
    options.engines.resize(pools.size());
    options.fleet = settings_;
    options.fleet.pools = std::move(pools);
    options.fleet.instance.backoff_first_s = 0.01;
    options.fleet.instance.backoff_most_s = 0.25;
    options.model_dir = folder_.path();
    options.fingerprint = *fingerprint_model(folder_.path());
    options.front.prompts = *PromptBuilder::load(folder_.path());
    options.front.end_tokens = {kEnd};
    options.front.max_model_len = 1000;
    options.pixels = store_;
    options.feature_bytes = feature_bytes_;
    auto threads = std::make_unique<Threads>(script_, folder_.path());
    threads_ = threads.get();
    PARVL_ASSIGN_OR_RETURN(engine_, FleetEngine::start(std::move(options), std::move(threads), kClock));
    return absl::OkStatus();
  }

  // With an image whose every value is `shows`, unless that is 0.
  std::shared_ptr<Client> submit(uint64_t seed, int64_t tokens, RequestId* id = nullptr, uint8_t shows = 0) {
    auto client = std::make_shared<Client>();
    EngineRequest request;
    auto prompt = std::make_shared<Prompt>();
    prompt->ids = {1, 2, 3};
    if (shows > 0) {
      ProcessedImage image = {.grid_t = 1, .grid_h = 2, .grid_w = 2, .patch_floats = 96, .merge_size = 2};
      image.key[0] = shows;
      image.patches.assign(size_t{4} * 96, shows);
      prompt->images.push_back(placed(*store_, std::move(image)));
      prompt->media.push_back({0, 1, 1});
    }
    request.prompt = prompt;
    request.sampling.seed = seed;
    request.sampling.max_tokens = tokens;
    request.on_token = [client](const TokenEvent& event) {
      std::lock_guard lock(client->mutex);
      client->tokens.push_back(event.token_id);
      client->text += event.text;
      client->changed.notify_all();
    };
    request.on_end = [client](const absl::StatusOr<GenerateResult>& result) {
      std::lock_guard lock(client->mutex);
      client->end = result;
      ++client->ends;
      client->changed.notify_all();
    };
    const RequestId given = engine_->submit(std::move(request));
    if (id != nullptr) *id = given;
    return client;
  }

  bool wait_for(const std::function<bool(const std::vector<InstanceStatus>&)>& condition) {
    const double end_s = kClock.now_seconds() + 30;
    while (!condition(engine_->instances())) {
      if (kClock.now_seconds() > end_s) return false;
      std::this_thread::yield();
    }
    return true;
  }
  size_t open() const {
    const auto all = engine_->instances();
    return static_cast<size_t>(std::count_if(all.begin(), all.end(), [](const auto& one) { return one.open; }));
  }

  // Until the encoder's pool is open, or not.
  void set_encoder(bool there) {
    script_->set_dead(0, !there);
    const auto epoch = engine_->instances()[0].epoch;
    if (!there) threads_->die(InstanceId{0}, epoch);
    ASSERT_TRUE(wait_for([&](const auto& all) { return all[0].open == there; }));
  }
  std::vector<TokenId> want(TokenId first, int64_t tokens) {
    std::vector<TokenId> out;
    for (int64_t i = 0; i + 1 < tokens; ++i) out.push_back(first + static_cast<TokenId>(i));
    out.push_back(kEnd);
    return out;
  }

  TemporaryFolder folder_;
  FleetSettings settings_;
  int64_t feature_bytes_ = int64_t{1} << 20;
  const std::shared_ptr<PixelStore> store_ = *PixelStore::start(kToken, 64 << 20, kClock);
  std::shared_ptr<Script> script_ = std::make_shared<Script>();
  Threads* threads_ = nullptr;
  std::unique_ptr<FleetEngine> engine_;
};

}  // namespace parvl
