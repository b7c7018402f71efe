#include "parvl/sched/record.h"

#include <utility>

#include "parvl/base/json.h"

namespace parvl {
namespace {

constexpr char kHex[] = "0123456789abcdef";

template <typename Bytes>
std::string hex(const Bytes& bytes) {
  std::string out;
  out.reserve(2 * bytes.size());
  for (const auto byte : bytes) {
    out += kHex[static_cast<uint8_t>(byte) >> 4];
    out += kHex[static_cast<uint8_t>(byte) & 15];
  }
  return out;
}

Json config_json(const SchedulerConfig& c) {
  return {{"record", kRecordFormat},
          {"block_size", c.block_size},
          {"num_blocks", c.num_blocks},
          {"max_model_len", c.max_model_len},
          {"max_batched_tokens", c.max_batched_tokens},
          {"max_seqs", c.max_seqs},
          {"encode_budget", c.encode_budget},
          {"encoder_cache_bytes", c.encoder_cache_bytes},
          {"prefix_caching", c.prefix_caching},
          {"starvation_s", c.starvation_s},
          {"step_s", c.step_s}};
}

Json request_json(const SchedRequest& request, double now) {
  Json media = Json::array();
  for (const MediaItem& m : request.media) {
    media.push_back({{"key", hex(m.key.bytes)},
                     {"modality", static_cast<int>(m.modality)},
                     {"begin", m.begin},
                     {"length", m.length},
                     {"cost", m.cost},
                     {"bytes", m.bytes}});
  }
  return {{"event", "add"},           {"now", now},
          {"id", request.id.value},   {"priority", request.priority},
          {"prompt", request.prompt}, {"media", media},
          {"given", request.given},   {"salt", hex(request.cache_salt)}};  // it may be any bytes; JSON is UTF-8
}

Json ids_json(const std::vector<RequestId>& ids) {
  Json out = Json::array();
  for (const RequestId id : ids) out.push_back(id.value);
  return out;
}

Json blocks_json(const std::vector<BlockId>& blocks) {
  Json out = Json::array();
  for (const BlockId block : blocks) out.push_back(block.value);
  return out;
}

Json decision_json(const SchedulerOutput& output) {
  Json sequences = Json::array(), encodes = Json::array(), kv_fetches = Json::array(), evicted = Json::array();
  for (const SequenceWork& work : output.sequences) {
    Json media = Json::array();
    for (const MediaUse& use : work.media) media.push_back({use.item, use.slot.value});
    sequences.push_back({{"id", work.id.value},
                         {"begin", work.begin},
                         {"count", work.count},
                         {"samples", work.samples},
                         {"blocks", blocks_json(work.blocks)},
                         {"media", media}});
  }
  for (const EncodeWork& work : output.encodes) encodes.push_back({work.slot.value, work.id.value, work.item});
  for (const KvFetch& fetch : output.kv_fetches) {
    kv_fetches.push_back({fetch.id.value, fetch.begin, fetch.count, blocks_json(fetch.blocks)});
  }
  for (const SlotId slot : output.evicted) evicted.push_back(slot.value);
  return {{"decision", output.step.value}, {"sequences", sequences}, {"encodes", encodes},
          {"kv_fetches", kv_fetches},      {"evicted", evicted},     {"preempted", ids_json(output.preempted)}};
}

Json ended_json(const std::vector<RequestId>& ids) { return {{"decision", "ended"}, {"ids", ids_json(ids)}}; }

}  // namespace

RecordedScheduler::RecordedScheduler(const SchedulerConfig& config, Write write)
    : scheduler_(config), write_(std::move(write)) {
  if (write_) write_(config_json(config).dump() + "\n");
}

absl::Status RecordedScheduler::add(SchedRequest request, double now) {
  if (write_) write_(request_json(request, now).dump() + "\n");
  return scheduler_.add(std::move(request), now);
}

void RecordedScheduler::finish(RequestId id) {
  if (write_) write_(Json{{"event", "finish"}, {"id", id.value}}.dump() + "\n");
  scheduler_.finish(id);
}

SchedulerOutput RecordedScheduler::schedule(double now) {
  if (write_) write_(Json{{"event", "schedule"}, {"now", now}}.dump() + "\n");
  SchedulerOutput output = scheduler_.schedule(now);
  if (write_) write_(decision_json(output).dump() + "\n");
  return output;
}

void RecordedScheduler::commit(const StepTokens& tokens) {
  if (write_) {
    const Json event = {
        {"event", "commit"}, {"step", tokens.step.value}, {"tokens", tokens.tokens}, {"seconds", tokens.seconds}};
    write_(event.dump() + "\n");
  }
  scheduler_.commit(tokens);
}

std::vector<RequestId> RecordedScheduler::commit_failed(StepId step) {
  if (write_) write_(Json{{"event", "commit_failed"}, {"step", step.value}}.dump() + "\n");
  std::vector<RequestId> ids = scheduler_.commit_failed(step);
  if (write_) write_(ended_json(ids).dump() + "\n");
  return ids;
}

void RecordedScheduler::commit_kv(RequestId id, bool ok) {
  if (write_) write_(Json{{"event", "commit_kv"}, {"id", id.value}, {"ok", ok}}.dump() + "\n");
  scheduler_.commit_kv(id, ok);
}

std::vector<RequestId> RecordedScheduler::commit_encode(SlotId slot, bool ok) {
  if (write_) write_(Json{{"event", "commit_encode"}, {"slot", slot.value}, {"ok", ok}}.dump() + "\n");
  std::vector<RequestId> ids = scheduler_.commit_encode(slot, ok);
  if (write_) write_(ended_json(ids).dump() + "\n");
  return ids;
}

}  // namespace parvl
