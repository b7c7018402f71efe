// A record of scheduling, as a file may hold it: replayed to its end or to a difference, or refused with a good
// message; never a failed check. Seeds are records of a scheduler that chance drives.
#include "parvl/sched/record.h"

#include "parvl/base/json.h"
#include "parvl/base/rng.h"
#include "tests/fuzz/replay_report.h"

namespace {

constexpr int64_t kMaxBlocks = 1000;  // more only costs the fuzzer time

parvl::SchedRequest random_request(parvl::Rng& rng, int64_t id) {
  parvl::SchedRequest request;
  request.id = parvl::RequestId{id};
  request.priority = static_cast<int>(rng.below(3));
  for (uint64_t n = 1 + rng.below(12); n > 0; --n) request.prompt.push_back(static_cast<int32_t>(rng.below(3)));
  if (rng.below(2) == 0) {
    parvl::MediaItem item;
    item.key.bytes[0] = static_cast<uint8_t>(rng.below(3));
    item.begin = static_cast<int64_t>(request.prompt.size());
    item.length = 4;
    item.cost = 16;
    item.bytes = 400;
    request.prompt.insert(request.prompt.end(), 4, 9);
    request.media.push_back(item);
  }
  if (rng.below(3) == 0) request.cache_salt = "s\xff";
  return request;
}

std::string random_record(uint64_t seed) {
  parvl::Rng rng(seed);
  parvl::SchedulerConfig config;
  config.block_size = 4;
  config.num_blocks = 8;
  config.max_model_len = 24;
  config.max_batched_tokens = 8;
  config.max_seqs = 3;
  config.encoder_cache_bytes = 1000;
  config.step_s = rng.below(2) == 0 ? 0 : 0.01;
  std::string text;
  parvl::RecordedScheduler scheduler(config, [&text](std::string_view line) { text += line; });
  std::vector<parvl::SlotId> encoding;
  for (int64_t turn = 1; turn <= 12; ++turn) {
    const double now = static_cast<double>(turn) / 4;
    scheduler.add(random_request(rng, turn), now).IgnoreError();
    if (rng.below(4) == 0) scheduler.finish(parvl::RequestId{1 + static_cast<int64_t>(rng.below(12))});
    for (const parvl::SlotId slot : encoding) scheduler.commit_encode(slot, rng.below(5) != 0);
    const parvl::SchedulerOutput output = scheduler.schedule(now);
    encoding.clear();
    for (const auto& work : output.encodes) encoding.push_back(work.slot);
    parvl::StepTokens tokens{output.step, {}, rng.uniform() / 20};
    for (const auto& work : output.sequences) {
      if (work.samples) tokens.tokens.push_back(static_cast<int32_t>(rng.below(3)));
    }
    if (output.sequences.empty()) continue;
    if (rng.below(6) == 0) {
      scheduler.commit_failed(output.step);
    } else if (scheduler.scheduler().check_tokens(tokens).ok()) {
      scheduler.commit(tokens);
    } else {
      break;
    }
  }
  return text;
}

// Whether the first line asks for a memory that is not worth the fuzzer's time.
bool too_large(std::string_view record) {
  const auto first = parvl::parse_json(record.substr(0, record.find('\n')), "the record");
  if (!first.ok() || !first->is_object()) return false;
  const auto blocks = first->find("num_blocks");
  return blocks != first->end() && blocks->is_number() && blocks->get<double>() > kMaxBlocks;
}

}  // namespace

std::vector<std::string> fuzz_seeds() { return record_seeds(random_record); }

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view record(reinterpret_cast<const char*>(data), size);
  if (!too_large(record)) require_good_report(parvl::replay(record));
  return 0;
}
