#include "parvl/sched/record.h"

#include <algorithm>
#include <utility>

#include "parvl/base/json.h"
#include "parvl/base/text.h"

namespace parvl {
namespace {

constexpr int kFormat = 1;
constexpr char kHex[] = "0123456789abcdef";

std::string hex(const MediaKey& key) {
  std::string out;
  for (const uint8_t byte : key.bytes) {
    out += kHex[byte >> 4];
    out += kHex[byte & 15];
  }
  return out;
}

MediaKey key_from(const std::string& text) {
  MediaKey key;
  if (text.size() != 2 * key.bytes.size()) throw std::runtime_error("a media key is not 64 hexadecimal digits");
  for (size_t i = 0; i < key.bytes.size(); ++i) {
    key.bytes[i] = static_cast<uint8_t>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
  }
  return key;
}

Json config_json(const SchedulerConfig& c) {
  return {{"record", kFormat},
          {"block_size", c.block_size},
          {"num_blocks", c.num_blocks},
          {"max_model_len", c.max_model_len},
          {"max_batched_tokens", c.max_batched_tokens},
          {"max_seqs", c.max_seqs},
          {"encode_budget", c.encode_budget},
          {"encoder_cache_bytes", c.encoder_cache_bytes},
          {"prefix_caching", c.prefix_caching},
          {"starvation_s", c.starvation_s}};
}

SchedulerConfig config_from(const Json& j) {
  if (j.at("record") != kFormat) throw std::runtime_error("the record has another format version");
  SchedulerConfig c;
  c.block_size = j.at("block_size");
  c.num_blocks = j.at("num_blocks");
  c.max_model_len = j.at("max_model_len");
  c.max_batched_tokens = j.at("max_batched_tokens");
  c.max_seqs = j.at("max_seqs");
  c.encode_budget = j.at("encode_budget");
  c.encoder_cache_bytes = j.at("encoder_cache_bytes");
  c.prefix_caching = j.at("prefix_caching");
  c.starvation_s = j.at("starvation_s");
  return c;
}

Json request_json(const SchedRequest& request, double now) {
  Json media = Json::array();
  for (const MediaItem& m : request.media) {
    media.push_back({{"key", hex(m.key)},
                     {"modality", static_cast<int>(m.modality)},
                     {"begin", m.begin},
                     {"length", m.length},
                     {"cost", m.cost},
                     {"bytes", m.bytes}});
  }
  // A salt may be any bytes; JSON is UTF-8.
  Json salt = Json::array();
  for (const char c : request.cache_salt) salt.push_back(static_cast<unsigned char>(c));
  return {{"event", "add"},
          {"now", now},
          {"id", request.id.value},
          {"priority", request.priority},
          {"prompt", request.prompt},
          {"media", media},
          {"salt", salt}};
}

SchedRequest request_from(const Json& j) {
  SchedRequest request;
  request.id = RequestId{j.at("id")};
  request.priority = j.at("priority");
  request.prompt = j.at("prompt").get<std::vector<TokenId>>();
  for (const Json& m : j.at("media")) {
    const int modality = m.at("modality");
    if (modality < 0 || modality >= kModalities) throw std::runtime_error("an unknown modality");
    request.media.push_back({key_from(m.at("key")), static_cast<Modality>(modality), m.at("begin"), m.at("length"),
                             m.at("cost"), m.at("bytes")});
  }
  for (const Json& byte : j.at("salt")) request.cache_salt += static_cast<char>(byte.get<int>());
  return request;
}

Json ids_json(const std::vector<RequestId>& ids) {
  Json out = Json::array();
  for (const RequestId id : ids) out.push_back(id.value);
  return out;
}

Json decision_json(const SchedulerOutput& output) {
  Json sequences = Json::array(), encodes = Json::array(), evicted = Json::array();
  for (const SequenceWork& work : output.sequences) {
    Json blocks = Json::array(), media = Json::array();
    for (const BlockId block : work.blocks) blocks.push_back(block.value);
    for (const MediaUse& use : work.media) media.push_back({use.item, use.slot.value});
    sequences.push_back({{"id", work.id.value},
                         {"begin", work.begin},
                         {"count", work.count},
                         {"samples", work.samples},
                         {"blocks", blocks},
                         {"media", media}});
  }
  for (const EncodeWork& work : output.encodes) encodes.push_back({work.slot.value, work.id.value, work.item});
  for (const SlotId slot : output.evicted) evicted.push_back(slot.value);
  return {{"decision", output.step.value},
          {"sequences", sequences},
          {"encodes", encodes},
          {"evicted", evicted},
          {"preempted", ids_json(output.preempted)}};
}

Json ended_json(const std::vector<RequestId>& ids) { return {{"decision", "ended"}, {"ids", ids_json(ids)}}; }

// One event, told to `scheduler`; its decisions are written by it.
void tell(RecordedScheduler& scheduler, const Json& event) {
  const std::string kind = event.at("event");
  if (kind == "add") {
    scheduler.add(request_from(event), event.at("now")).IgnoreError();  // refused then, refused now
  } else if (kind == "finish") {
    scheduler.finish(RequestId{event.at("id")});
  } else if (kind == "schedule") {
    scheduler.schedule(event.at("now"));
  } else if (kind == "commit") {
    scheduler.commit({StepId{event.at("step")}, event.at("tokens").get<std::vector<TokenId>>()});
  } else if (kind == "commit_failed") {
    scheduler.commit_failed(StepId{event.at("step")});
  } else if (kind == "commit_encode") {
    scheduler.commit_encode(SlotId{event.at("slot")}, event.at("ok"));
  } else {
    throw std::runtime_error("an unknown event " + excerpt(kind));
  }
}

// A decision that the record leaves out before line `line` is a difference too.
void expect_no_more(std::vector<std::string>& decisions, int64_t line, ReplayReport& report) {
  if (decisions.empty()) return;
  report.differing_line = line;
  report.recorded = "no decision";
  report.replayed = decisions.front();
  decisions.clear();
}

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
    write_(Json{{"event", "commit"}, {"step", tokens.step.value}, {"tokens", tokens.tokens}}.dump() + "\n");
  }
  scheduler_.commit(tokens);
}

std::vector<RequestId> RecordedScheduler::commit_failed(StepId step) {
  if (write_) write_(Json{{"event", "commit_failed"}, {"step", step.value}}.dump() + "\n");
  std::vector<RequestId> ids = scheduler_.commit_failed(step);
  if (write_) write_(ended_json(ids).dump() + "\n");
  return ids;
}

std::vector<RequestId> RecordedScheduler::commit_encode(SlotId slot, bool ok) {
  if (write_) write_(Json{{"event", "commit_encode"}, {"slot", slot.value}, {"ok", ok}}.dump() + "\n");
  std::vector<RequestId> ids = scheduler_.commit_encode(slot, ok);
  if (write_) write_(ended_json(ids).dump() + "\n");
  return ids;
}

absl::StatusOr<ReplayReport> replay(std::string_view record) {
  ReplayReport report;
  std::unique_ptr<RecordedScheduler> scheduler;
  std::vector<std::string> decisions;  // made by the last event and not compared yet
  int64_t line_number = 0;
  for (size_t at = 0; at < record.size();) {
    const size_t end = record.find('\n', at);
    report.cut = end == std::string_view::npos;
    if (report.cut) break;
    const std::string line(record.substr(at, end - at));
    at = end + 1;
    ++line_number;
    const auto json = parse_json(line, absl::StrCat("line ", line_number));
    if (!json.ok()) return json.status();
    const absl::Status status = catch_exceptions(absl::StrCat("line ", line_number), [&]() -> absl::Status {
      if (scheduler == nullptr) {
        const SchedulerConfig config = config_from(*json);
        PARVL_RETURN_IF_ERROR(validate(config));
        scheduler = std::make_unique<RecordedScheduler>(config, [&](std::string_view text) {
          if (text.starts_with("{\"decision\"")) decisions.emplace_back(text.substr(0, text.size() - 1));
        });
      } else if (json->contains("event")) {
        ++report.events;
        expect_no_more(decisions, line_number, report);
        if (report.differing_line == 0) tell(*scheduler, *json);
      } else {
        ++report.decisions;
        const std::string ours = decisions.empty() ? "no decision" : decisions.front();
        if (!decisions.empty()) decisions.erase(decisions.begin());
        if (ours != line && report.differing_line == 0) {
          report.differing_line = line_number;
          report.recorded = line;
          report.replayed = ours;
        }
      }
      return absl::OkStatus();
    });
    if (!status.ok()) return invalid(status.message());
    if (report.differing_line != 0) return report;  // what follows makes no sense to a scheduler that went elsewhere
  }
  if (scheduler == nullptr) return invalid("the record is empty");
  if (!report.cut) expect_no_more(decisions, line_number + 1, report);
  return report;
}

}  // namespace parvl
