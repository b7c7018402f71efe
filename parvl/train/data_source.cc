#include "parvl/train/data_source.h"

#include <absl/strings/match.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <unordered_set>
#include <utility>

#include "parvl/base/json.h"
#include "parvl/base/text.h"

namespace parvl {
namespace {

namespace fs = std::filesystem;

const std::vector<std::string> kRoles = {"system", "user", "assistant", "tool"};

bool is_plain_file(const std::string& path) {
  std::error_code error;
  return fs::is_regular_file(path, error);
}

// Turns the lines of one file into samples; remembers which images were seen to exist.
class LineReader {
 public:
  LineReader(std::string folder, const SourceLimits& limits) : folder_(std::move(folder)), limits_(limits) {}

  absl::Status read(const Json& line, RawSample& out) {
    if (!line.is_object()) return invalid("must be an object with \"messages\", found ", line.type_name());
    if (line.contains("tools")) return not_available_yet("\"tools\" in training data");
    const auto messages = line.find("messages");
    if (messages == line.end()) return invalid("has no \"messages\"");
    if (!messages->is_array() || messages->empty())
      return invalid("\"messages\" must be a list of at least one message");
    for (const Json& message : *messages) {
      const absl::Status status = read_message(message, out);
      if (!status.ok()) return with_context(status, absl::StrCat("message ", out.messages.size()));
    }
    return absl::OkStatus();
  }

 private:
  absl::Status read_message(const Json& json, RawSample& out) {
    Message& message = out.messages.emplace_back();
    if (!json.is_object()) return invalid("must be an object with \"role\" and \"content\", found ", json.type_name());
    for (const auto& [key, value] : json.items()) {
      if (key != "role" && key != "content")
        return invalid("has the unknown key ", excerpt(key), "; valid: role, content");
    }
    PARVL_ASSIGN_OR_RETURN(message.role, json_value<std::string>(json, "role", ""));
    if (std::find(kRoles.begin(), kRoles.end(), message.role) == kRoles.end()) {
      return invalid("has the role ", excerpt(message.role), "; valid: system, user, assistant, tool");
    }
    const auto content = json.find("content");
    if (content == json.end()) return invalid("has no \"content\"");
    if (content->is_string()) {
      message.content.push_back({ContentPart::Kind::kText, content->get<std::string>(), -1});
      return absl::OkStatus();
    }
    if (!content->is_array())
      return invalid("\"content\" must be text or a list of parts, found ", content->type_name());
    for (const Json& part : *content) PARVL_RETURN_IF_ERROR(read_part(part, message, out));
    return absl::OkStatus();
  }

  absl::Status read_part(const Json& part, Message& message, RawSample& out) {
    if (!part.is_object()) return invalid("a content part must be an object with \"type\", found ", part.type_name());
    PARVL_ASSIGN_OR_RETURN(const std::string type, json_value<std::string>(part, "type", ""));
    if (type == "audio" || type == "video") return not_available_yet("a content part of type '" + type + "'");
    if (type != "text" && type != "image") {
      return invalid("has a content part of type ", excerpt(type), "; valid: text, image");
    }
    const auto value = part.find(type);  // {"type": "text", "text": ...}, {"type": "image", "image": ...}
    if (value == part.end() || !value->is_string()) {
      return invalid("a content part of type '", type, "' needs \"", type, "\" with text in it");
    }
    if (type == "text") {
      message.content.push_back({ContentPart::Kind::kText, value->get<std::string>(), -1});
      return absl::OkStatus();
    }
    if (out.image_paths.size() >= limits_.max_images) return invalid("has more than ", limits_.max_images, " images");
    const std::string& written = value->get_ref<const std::string&>();
    const std::string path = (fs::path(folder_) / written).lexically_normal().string();
    if (!seen_.contains(path)) {
      if (!is_plain_file(path))
        return absl::NotFoundError(
            absl::StrCat("the image ", excerpt(written, 200), " is not a file (", excerpt(path, 400), ")"));
      seen_.insert(path);
    }
    message.content.push_back({ContentPart::Kind::kImage, "", static_cast<int>(out.image_paths.size())});
    out.image_paths.push_back(path);
    return absl::OkStatus();
  }

  std::string folder_;
  SourceLimits limits_;
  std::unordered_set<std::string> seen_;
};

// The next line without its break, at most `limit` bytes of it; `longer` says that there was more.
bool read_line(std::istream& stream, size_t limit, std::string& line, bool& longer) {
  line.clear();
  longer = false;
  std::streambuf* buffer = stream.rdbuf();
  int c = buffer->sbumpc();
  if (c == EOF) return false;
  for (; c != EOF && c != '\n'; c = buffer->sbumpc()) {
    if (line.size() == limit) {
      longer = true;
      return true;
    }
    line += static_cast<char>(c);
  }
  return true;
}

RawSample easy_vqa_sample(const std::string& name, const std::string& image, std::string question, std::string answer) {
  RawSample sample;
  sample.name = name;
  sample.image_paths = {image};
  Message user;
  user.role = "user";
  user.content.push_back({ContentPart::Kind::kImage, "", 0});
  user.content.push_back({ContentPart::Kind::kText, std::move(question), -1});
  Message assistant;
  assistant.role = "assistant";
  assistant.content.push_back({ContentPart::Kind::kText, std::move(answer), -1});
  sample.messages = {std::move(user), std::move(assistant)};
  return sample;
}

bool in_split(const std::string& split, int64_t image_id) {
  if (split == "fit") return image_id % 10 != 0;
  if (split == "holdout") return image_id % 10 == 0;
  return true;
}

}  // namespace

absl::StatusOr<std::vector<RawSample>> read_jsonl(std::istream& stream, const std::string& name,
                                                  const std::string& folder, const SourceLimits& limits) {
  LineReader reader(folder, limits);
  std::vector<RawSample> samples;
  std::string line;
  bool longer = false;
  for (int64_t number = 1; read_line(stream, limits.max_line_bytes, line, longer); ++number) {
    const std::string place = absl::StrCat(name, ":", number);
    if (longer) return invalid(place, ": the line is longer than ", limits.max_line_bytes, " bytes");
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    if (samples.size() >= limits.max_samples) return invalid(place, ": more than ", limits.max_samples, " samples");
    PARVL_ASSIGN_OR_RETURN(const Json json, parse_json(line, place));
    RawSample& sample = samples.emplace_back();
    sample.name = place;
    PARVL_RETURN_IF_ERROR(with_context(reader.read(json, sample), place));
  }
  if (stream.bad()) return failed("cannot read ", name);
  return samples;
}

absl::StatusOr<std::vector<RawSample>> read_easy_vqa(const std::string& data_folder, const std::string& split) {
  const std::string part = split == "test" ? "test" : "train";
  const fs::path folder = fs::path(data_folder) / part;
  const std::string file = (folder / "questions.json").string();
  PARVL_ASSIGN_OR_RETURN(const Json questions, read_json_file(file));
  if (!questions.is_array()) return invalid(file, ": must be a list of [question, answer, image]");
  std::vector<RawSample> samples;
  std::unordered_set<int64_t> seen;
  for (size_t i = 0; i < questions.size(); ++i) {
    const Json& entry = questions[i];
    const bool complete = entry.is_array() && entry.size() == 3 && entry[0].is_string() && entry[1].is_string() &&
                          entry[2].is_number_unsigned();
    if (!complete) return invalid(file, ": entry ", i, " must be [question, answer, image]");
    const int64_t id = entry[2].get<int64_t>();
    if (!in_split(split, id)) continue;
    const std::string image = (folder / "images" / absl::StrCat(id, ".png")).string();
    if (seen.insert(id).second && !is_plain_file(image))
      return absl::NotFoundError(absl::StrCat(file, ": entry ", i, " needs ", image, ", which is not a file"));
    samples.push_back(easy_vqa_sample(absl::StrCat("easy-vqa:", split, " #", i), image, entry[0].get<std::string>(),
                                      entry[1].get<std::string>()));
  }
  return samples;
}

absl::StatusOr<std::string> find_easy_vqa(const std::string& base_dir) {
  std::error_code error;
  const fs::path current = fs::current_path(error);
  for (const fs::path& start : {fs::absolute(base_dir, error), fs::read_symlink("/proc/self/exe", error), current}) {
    for (fs::path folder = start; !folder.empty(); folder = folder.parent_path()) {
      const fs::path candidate = folder / ".deps/data/easy_vqa/data";
      if (fs::is_directory(candidate, error)) return candidate.string();
      if (folder == folder.root_path()) break;
    }
  }
  return absl::NotFoundError(absl::StrCat("the easy-VQA images are not there: no .deps/data/easy_vqa above ", base_dir,
                                          ", the program or ", current.string(),
                                          "; `make build` in a ParVL checkout downloads them"));
}

absl::StatusOr<std::shared_ptr<const Dataset>> Dataset::load(const std::string& source, const std::string& base_dir) {
  auto dataset = std::make_shared<Dataset>();
  const std::string kEasyVqa = "easy-vqa:";
  if (absl::StartsWith(source, kEasyVqa)) {
    const std::string split = source.substr(kEasyVqa.size());
    if (split != "train" && split != "test" && split != "fit" && split != "holdout") {
      return invalid("unknown data ", excerpt(source),
                     "; valid: easy-vqa:train, easy-vqa:test, easy-vqa:fit, easy-vqa:holdout");
    }
    PARVL_ASSIGN_OR_RETURN(const std::string folder, find_easy_vqa(base_dir));
    PARVL_ASSIGN_OR_RETURN(dataset->samples_, read_easy_vqa(folder, split));
  } else {
    const fs::path path = (fs::path(base_dir) / source).lexically_normal();
    std::error_code error;
    if (fs::is_directory(path, error)) return invalid(path.string(), " is a folder; the data must be a JSONL file");
    std::ifstream stream(path, std::ios::binary);
    if (!stream)
      return absl::NotFoundError(absl::StrCat("cannot open the data ", path.string(), ": ", std::strerror(errno)));
    PARVL_ASSIGN_OR_RETURN(dataset->samples_, read_jsonl(stream, path.string(), path.parent_path().string()));
  }
  if (dataset->samples_.empty()) return invalid("the data ", excerpt(source, 200), " holds no sample");
  return dataset;
}

}  // namespace parvl
