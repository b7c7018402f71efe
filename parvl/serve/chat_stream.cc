#include "parvl/serve/chat_stream.h"

#include <utility>

#include "parvl/base/text.h"

namespace parvl {
namespace {

constexpr size_t kMaxEventBytes = 1u << 20;
constexpr size_t kMaxMessageBytes = 300;

// Whether a choice's delta brings something that a user would see.
bool brings_text(const Json& choice) {
  const auto delta = choice.find("delta");
  if (delta == choice.end() || !delta->is_object()) return false;
  for (const char* key : {"content", "reasoning_content"}) {
    const auto text = delta->find(key);
    if (text != delta->end() && text->is_string() && !text->get_ref<const std::string&>().empty()) return true;
  }
  return false;
}

}  // namespace

absl::Status ChatStream::push(std::string_view bytes, double now_s) {
  size_t end;
  while ((end = bytes.find('\n')) != std::string_view::npos) {
    rest_ += bytes.substr(0, end);
    bytes.remove_prefix(end + 1);
    if (rest_.ends_with('\r')) rest_.pop_back();
    const std::string line = std::exchange(rest_, {});
    PARVL_RETURN_IF_ERROR(take_line(line, now_s));
  }
  rest_ += bytes;
  if (rest_.size() + data_.size() > kMaxEventBytes) return failed("an event of more than ", kMaxEventBytes, " bytes");
  return absl::OkStatus();
}

absl::Status ChatStream::take_line(std::string_view line, double now_s) {
  if (line.empty()) return take_event(now_s);
  const size_t colon = std::min(line.find(':'), line.size());
  const std::string_view field = line.substr(0, colon);
  std::string_view value = line.substr(std::min(colon + 1, line.size()));
  if (value.starts_with(' ')) value.remove_prefix(1);
  if (field == "event") name_ = value;
  if (field == "data") data_ += data_.empty() ? std::string(value) : "\n" + std::string(value);
  if (data_.size() > kMaxEventBytes) return failed("an event of more than ", kMaxEventBytes, " bytes");
  return absl::OkStatus();  // comments, and fields that mean nothing here
}

absl::Status ChatStream::take_event(double now_s) {
  const std::string name = std::exchange(name_, {}), data = std::exchange(data_, {});
  if (data.empty()) return absl::OkStatus();
  if (name == "error") return failed(error_message(data));
  if (data == "[DONE]") {
    done_ = true;
    done_s_ = now_s;
    if (!has_text_) first_text_s_ = now_s;
    return absl::OkStatus();
  }
  const absl::StatusOr<Json> chunk = parse_json(data, "a chunk of the stream");
  if (!chunk.ok()) return chunk.status();
  return take_chunk(*chunk, now_s);
}

absl::Status ChatStream::take_chunk(const Json& chunk, double now_s) {
  if (!chunk.is_object()) return failed("a chunk of the stream is no object but ", shown(chunk));
  if (const auto error = chunk.find("error"); error != chunk.end() && !error->is_null()) {
    return failed(error_message(chunk.dump(-1, ' ', false, Json::error_handler_t::replace)));
  }
  if (const auto usage = chunk.find("usage"); usage != chunk.end() && usage->is_object()) {
    PARVL_ASSIGN_OR_RETURN(prompt_tokens_, json_value<int64_t>(*usage, "prompt_tokens", 0));
    PARVL_ASSIGN_OR_RETURN(output_tokens_, json_value<int64_t>(*usage, "completion_tokens", 0));
    has_usage_ = true;
  }
  const auto choices = chunk.find("choices");
  if (choices == chunk.end() || !choices->is_array() || choices->empty()) return absl::OkStatus();
  if (!brings_text(choices->front())) return absl::OkStatus();
  if (std::exchange(has_text_, true)) {
    gaps_ms_.push_back(static_cast<float>((now_s - last_text_s_) * 1e3));
  } else {
    first_text_s_ = now_s;
  }
  last_text_s_ = now_s;
  return absl::OkStatus();
}

std::string error_message(std::string_view body) {
  const absl::StatusOr<Json> json = parse_json(body, "the error");
  const Json* at = json.ok() && json->is_object() ? &*json : nullptr;
  if (at != nullptr && at->contains("error") && (*at)["error"].is_object()) at = &(*at)["error"];
  if (at != nullptr && at->contains("message") && (*at)["message"].is_string()) {
    return one_line((*at)["message"].get_ref<const std::string&>().substr(0, kMaxMessageBytes));
  }
  return one_line(body.substr(0, kMaxMessageBytes));
}

}  // namespace parvl
