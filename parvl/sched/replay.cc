// A record, which may hold anything, back through the scheduler: every value has its type, and every event is one that
// an engine could have told.
#include <algorithm>
#include <stdexcept>
#include <utility>

#include "parvl/base/json.h"
#include "parvl/base/text.h"
#include "parvl/sched/replay_lines.h"

namespace parvl {
namespace {

// Reading; what is wrong is thrown as one sentence and ends at the line's edge.
[[noreturn]] void wrong(const std::string& sentence) { throw std::runtime_error(sentence); }

const Json& member(const Json& object, const char* name) {
  if (!object.is_object()) wrong("an object was expected, found " + shown(object));
  const auto found = object.find(name);
  if (found == object.end()) wrong(absl::StrCat("'", name, "' is missing"));
  return *found;
}

int64_t whole(const Json& value, const char* name) {
  const bool fits = value.is_number_integer() && (!value.is_number_unsigned() || value.get<uint64_t>() <= INT64_MAX);
  if (!fits) wrong(absl::StrCat("'", name, "' must hold whole numbers, found ", shown(value)));
  return value.get<int64_t>();
}

int64_t whole_at(const Json& object, const char* name) { return whole(member(object, name), name); }

double number_at(const Json& object, const char* name) {
  const Json& value = member(object, name);
  if (!value.is_number()) wrong(absl::StrCat("'", name, "' must be a number, found ", shown(value)));
  return value.get<double>();
}

bool flag_at(const Json& object, const char* name) {
  const Json& value = member(object, name);
  if (!value.is_boolean()) wrong(absl::StrCat("'", name, "' must be true or false, found ", shown(value)));
  return value.get<bool>();
}

std::string text_at(const Json& object, const char* name) {
  const Json& value = member(object, name);
  if (!value.is_string()) wrong(absl::StrCat("'", name, "' must be a string, found ", shown(value)));
  return value.get<std::string>();
}

const Json& list_at(const Json& object, const char* name) {
  const Json& value = member(object, name);
  if (!value.is_array()) wrong(absl::StrCat("'", name, "' must be a list, found ", shown(value)));
  return value;
}

int64_t within(int64_t value, int64_t lowest, int64_t highest, const char* name) {
  if (value < lowest || value > highest) {
    wrong(absl::StrCat("'", name, "' must be between ", lowest, " and ", highest, ", found ", value));
  }
  return value;
}

std::vector<TokenId> tokens_at(const Json& object, const char* name) {
  std::vector<TokenId> tokens;
  for (const Json& value : list_at(object, name)) {
    tokens.push_back(static_cast<TokenId>(within(whole(value, name), 0, INT32_MAX, name)));
  }
  return tokens;
}

// Of hexadecimal digits, two a byte.
std::string bytes_at(const Json& object, const char* name) {
  const std::string text = text_at(object, name);
  const auto digit = [name](char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c < 'a' || c > 'f') wrong(absl::StrCat("'", name, "' holds a character that is no hexadecimal digit"));
    return c - 'a' + 10;
  };
  if (text.size() % 2 != 0) wrong(absl::StrCat("'", name, "' has an odd number of hexadecimal digits"));
  std::string out;
  for (size_t i = 0; i < text.size(); i += 2) out += static_cast<char>(digit(text[i]) << 4 | digit(text[i + 1]));
  return out;
}

MediaKey key_at(const Json& object) {
  MediaKey key;
  const std::string bytes = bytes_at(object, "key");
  if (bytes.size() != key.bytes.size()) wrong("a media key is not 64 hexadecimal digits");
  std::copy(bytes.begin(), bytes.end(), key.bytes.begin());
  return key;
}

SchedulerConfig config_from(const Json& j) {
  if (whole_at(j, "record") != kRecordFormat) wrong("the record has another format version");
  SchedulerConfig c;
  c.block_size = whole_at(j, "block_size");
  c.num_blocks = whole_at(j, "num_blocks");
  c.max_model_len = whole_at(j, "max_model_len");
  c.max_batched_tokens = whole_at(j, "max_batched_tokens");
  c.max_seqs = whole_at(j, "max_seqs");
  const Json& budget = list_at(j, "encode_budget");
  if (budget.size() != c.encode_budget.size()) wrong("'encode_budget' must have a number for each modality");
  for (size_t i = 0; i < budget.size(); ++i) c.encode_budget[i] = whole(budget[i], "encode_budget");
  c.encoder_cache_bytes = whole_at(j, "encoder_cache_bytes");
  c.prefix_caching = flag_at(j, "prefix_caching");
  c.starvation_s = number_at(j, "starvation_s");
  c.step_s = number_at(j, "step_s");
  return c;
}

SchedRequest request_from(const Json& j) {
  SchedRequest request;
  request.id = RequestId{whole_at(j, "id")};
  request.priority = static_cast<int>(within(whole_at(j, "priority"), INT32_MIN, INT32_MAX, "priority"));
  request.prompt = tokens_at(j, "prompt");
  for (const Json& m : list_at(j, "media")) {
    const int64_t modality = within(whole_at(m, "modality"), 0, kModalities - 1, "modality");
    request.media.push_back({key_at(m), static_cast<Modality>(modality), whole_at(m, "begin"), whole_at(m, "length"),
                             whole_at(m, "cost"), whole_at(m, "bytes")});
  }
  request.given = whole_at(j, "given");
  request.cache_salt = bytes_at(j, "salt");
  return request;
}

// One event, told to `scheduler` if it could have happened; its decisions are written by it.
absl::Status tell(RecordedScheduler& scheduler, const Json& event) {
  const Scheduler& now = scheduler.scheduler();
  const std::string kind = text_at(event, "event");
  if (kind == "add") {
    SchedRequest request = request_from(event);
    PARVL_RETURN_IF_ERROR(validate(request));
    if (now.knows(request.id)) return invalid("the request ", request.id.value, " is there already");
    scheduler.add(std::move(request), number_at(event, "now")).IgnoreError();  // refused then, refused now
  } else if (kind == "finish") {
    scheduler.finish(RequestId{whole_at(event, "id")});
  } else if (kind == "schedule") {
    if (now.in_flight()) return invalid("a step was scheduled while another is in flight");
    scheduler.schedule(number_at(event, "now"));
  } else if (kind == "commit") {
    const StepTokens tokens{StepId{whole_at(event, "step")}, tokens_at(event, "tokens"), number_at(event, "seconds")};
    PARVL_RETURN_IF_ERROR(now.check_tokens(tokens));
    scheduler.commit(tokens);
  } else if (kind == "commit_failed") {
    const StepId step{whole_at(event, "step")};
    PARVL_RETURN_IF_ERROR(now.check_step(step));
    scheduler.commit_failed(step);
  } else if (kind == "commit_encode") {
    const SlotId slot{whole_at(event, "slot")};
    if (!now.encodes(slot)) return invalid("nothing is being encoded into slot ", slot.value);
    scheduler.commit_encode(slot, flag_at(event, "ok"));
  } else if (kind == "commit_kv") {
    const RequestId id{whole_at(event, "id")};
    if (!now.fetches(id)) return invalid("the request ", id.value, " fetches no keys and values");
    scheduler.commit_kv(id, flag_at(event, "ok"));
  } else {
    return invalid("an unknown event ", excerpt(kind));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ReplayReport> replay(std::string_view record) {
  std::unique_ptr<RecordedScheduler> scheduler;
  ReplayedCode code;
  code.begin = [&scheduler](const Json& settings, RecordedScheduler::Write write) -> absl::Status {
    const SchedulerConfig config = config_from(settings);
    PARVL_RETURN_IF_ERROR(validate(config));
    scheduler = std::make_unique<RecordedScheduler>(config, std::move(write));
    return absl::OkStatus();
  };
  code.tell = [&scheduler](const Json& event) { return tell(*scheduler, event); };
  return replay_lines(record, code);
}

}  // namespace parvl
