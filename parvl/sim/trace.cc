#include "parvl/sim/trace.h"

#include <absl/strings/numbers.h>
#include <absl/strings/str_split.h>

#include <algorithm>
#include <cmath>

#include "parvl/base/file.h"
#include "parvl/base/json.h"
#include "parvl/base/rng.h"
#include "parvl/base/text.h"

namespace parvl {
namespace {

constexpr uint64_t kArrivalStream = 0x7261746573;  // apart from what else is drawn from the same seed

absl::Status check_range(const std::string& what, int64_t value, int64_t lowest, int64_t highest) {
  if (value >= lowest && value <= highest) return absl::OkStatus();
  return invalid(what, " must be between ", lowest, " and ", highest, ", found ", value);
}

absl::Status check_request(const TraceRequest& request, const TraceLimits& limits) {
  if (request.images.size() > limits.images) {
    return invalid("\"images\" holds ", request.images.size(), " images; at most ", limits.images, " are allowed");
  }
  for (const TraceImage& image : request.images) {
    PARVL_RETURN_IF_ERROR(check_range("an image's width", image.width, 1, limits.image_side));
    PARVL_RETURN_IF_ERROR(check_range("an image's height", image.height, 1, limits.image_side));
  }
  PARVL_RETURN_IF_ERROR(check_range("the number of text tokens", request.text_tokens, 0, limits.tokens));
  PARVL_RETURN_IF_ERROR(check_range("the number of output tokens", request.output_tokens, 1, limits.tokens));
  if (request.images.empty() && request.text_tokens == 0 && request.messages.empty()) {
    return invalid("the request is empty; give it images, text tokens or messages");
  }
  return absl::OkStatus();
}

absl::Status check_message(const Json& message) {
  if (!message.is_object()) return invalid("a message must be an object, found ", shown(message));
  PARVL_ASSIGN_OR_RETURN(const std::string role, json_value<std::string>(message, "role", ""));
  if (role.empty()) return invalid("a message has no \"role\"");
  const auto content = message.find("content");
  if (content == message.end() || content->is_string() || content->is_null()) return absl::OkStatus();
  if (!content->is_array()) return invalid("\"content\" must be text or a list of parts, found ", shown(*content));
  for (const Json& part : *content) {
    if (!part.is_object()) return invalid("a content part must be an object, found ", shown(part));
    PARVL_ASSIGN_OR_RETURN(const std::string type, json_value<std::string>(part, "type", ""));
    if (type == "input_audio" || type == "audio_url") return not_available_yet("audio in a trace");
    if (type == "video_url") return not_available_yet("video in a trace");
    if (type != "text" && type != "image_url") {
      return invalid("a content part has the type ", excerpt(type), "; valid: text, image_url");
    }
  }
  return absl::OkStatus();
}

absl::Status read_messages(const Json& line, TraceRequest& out) {
  const auto messages = line.find("messages");
  if (messages == line.end()) return absl::OkStatus();
  for (const char* key : {"images", "text_tokens"}) {
    if (line.contains(key)) return invalid("has both \"messages\" and \"", key, "\"; leave one of them out");
  }
  if (!messages->is_array() || messages->empty()) {
    return invalid("\"messages\" must be a list of at least one message, found ", shown(*messages));
  }
  for (const Json& message : *messages) PARVL_RETURN_IF_ERROR(check_message(message));
  out.messages = messages->dump();
  return absl::OkStatus();
}

absl::Status read_images(const Json& line, TraceRequest& out) {
  const auto images = line.find("images");
  if (images == line.end()) return absl::OkStatus();
  const auto refuse = [](const Json& found) {
    return invalid("\"images\" must be a list of [width, height] in whole pixels, found ", shown(found));
  };
  if (!images->is_array()) return refuse(*images);
  for (const Json& image : *images) {
    if (!image.is_array() || image.size() != 2) return refuse(image);
    for (const Json& side : image) {
      if (!side.is_number_unsigned() || side > uint64_t{1} << 40) return refuse(side);
    }
    out.images.push_back({image[0].get<int64_t>(), image[1].get<int64_t>()});
  }
  return absl::OkStatus();
}

absl::Status read_line(const Json& line, const TraceLimits& limits, TraceRequest& out) {
  if (!line.is_object()) return invalid("must be an object, found ", shown(line));
  const std::vector<std::string> keys = {"t", "images", "text_tokens", "output_tokens", "messages", "video", "audio_s"};
  for (const auto& [key, value] : line.items()) {
    if (std::find(keys.begin(), keys.end(), key) != keys.end()) continue;
    const std::string meant = likely_meant(key, keys);
    return invalid("has the unknown key ", excerpt(key), meant.empty() ? "" : "; did you mean " + meant + "?");
  }
  for (const auto& [key, name] : {std::pair("audio_s", "audio"), std::pair("video", "video")}) {
    const auto items = line.find(key);
    if (items == line.end() || items->is_null()) continue;
    if (!items->is_array()) return invalid("\"", key, "\" must be a list, found ", shown(*items));
    if (!items->empty()) return not_available_yet(absl::StrCat(name, " in a trace"));
  }
  PARVL_ASSIGN_OR_RETURN(out.t_s, json_value<double>(line, "t", -1));
  if (!line.contains("t")) return invalid("has no \"t\", the seconds after the trace's start");
  if (!(out.t_s >= 0 && out.t_s <= limits.seconds)) {
    return invalid("\"t\" must be between 0 and ", limits.seconds, " seconds, found ", shown(line["t"]));
  }
  PARVL_RETURN_IF_ERROR(read_messages(line, out));
  PARVL_RETURN_IF_ERROR(read_images(line, out));
  PARVL_ASSIGN_OR_RETURN(out.text_tokens, json_value<int64_t>(line, "text_tokens", 0));
  PARVL_ASSIGN_OR_RETURN(out.output_tokens, json_value<int64_t>(line, "output_tokens", 0));
  return check_request(out, limits);
}

absl::Status read_synthetic_images(const std::string& value, std::vector<TraceImage>& out) {
  const std::vector<std::string> numbers = absl::StrSplit(value, 'x');
  int64_t count = 0;
  TraceImage image;
  if (numbers.size() != 3 || !absl::SimpleAtoi(numbers[0], &count) || !absl::SimpleAtoi(numbers[1], &image.width) ||
      !absl::SimpleAtoi(numbers[2], &image.height)) {
    return invalid("images=", excerpt(value), " must be like images=2x448x448: count, width, height");
  }
  PARVL_RETURN_IF_ERROR(check_range("the number of images", count, 0, 1000));
  out.assign(static_cast<size_t>(count), image);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<TraceRequest>> parse_trace(std::string_view text, const std::string& name,
                                                      const TraceLimits& limits) {
  std::vector<TraceRequest> trace;
  JsonLimits json_limits;
  json_limits.max_bytes = limits.line_bytes;
  int64_t number = 0;
  for (size_t at = 0; at < text.size();) {
    const std::string_view line = text.substr(at, text.find('\n', at) - at);
    at += line.size() + 1;
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const std::string place = absl::StrCat(name, " line ", number);
    if (trace.size() == limits.requests) return invalid(place, ": over the limit of ", limits.requests, " requests");
    PARVL_ASSIGN_OR_RETURN(const Json json, parse_json(line, place, json_limits));
    const absl::Status status = read_line(json, limits, trace.emplace_back());
    if (!status.ok()) return with_context(status, place);
  }
  if (trace.empty()) return invalid(name, " holds no request");
  std::stable_sort(trace.begin(), trace.end(),
                   [](const TraceRequest& a, const TraceRequest& b) { return a.t_s < b.t_s; });
  return trace;
}

absl::StatusOr<std::vector<TraceRequest>> read_trace(const std::string& path, const TraceLimits& limits) {
  PARVL_ASSIGN_OR_RETURN(const std::string text, read_file(path, limits.file_bytes));
  return parse_trace(text, path, limits);
}

absl::StatusOr<TraceRequest> parse_synthetic(const std::string& text, const TraceLimits& limits) {
  TraceRequest request;
  const std::vector<std::string> items = absl::StrSplit(text, ',');
  for (const std::string& item : items) {
    const size_t equals = std::min(item.find('='), item.size());
    const std::string key = item.substr(0, equals), value = item.substr(std::min(equals + 1, item.size()));
    if (key == "images") {
      PARVL_RETURN_IF_ERROR(read_synthetic_images(value, request.images));
    } else if (key == "text" || key == "output") {
      int64_t& out = key == "text" ? request.text_tokens : request.output_tokens;
      if (!absl::SimpleAtoi(value, &out)) return invalid(key, "=", excerpt(value), " must be a number of tokens");
    } else if (key == "audio" || key == "video") {
      return not_available_yet(key + " in a synthetic request");
    } else {
      return invalid(excerpt(item), " is not known; give images=COUNTxWIDTHxHEIGHT, text=TOKENS, output=TOKENS");
    }
  }
  PARVL_RETURN_IF_ERROR(check_request(request, limits));
  return request;
}

std::vector<double> poisson_times(size_t count, double rate, uint64_t seed) {
  Rng rng(seed, kArrivalStream);
  std::vector<double> times;
  times.reserve(count);
  double now = 0;
  for (size_t i = 0; i < count; ++i) {
    times.push_back(now);
    now += -std::log(rng.uniform()) / rate;
  }
  return times;
}

}  // namespace parvl
