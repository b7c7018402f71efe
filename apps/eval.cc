// parvl eval: how often a model's greedy answers are the data set's.
#include <absl/strings/ascii.h>
#include <absl/strings/match.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "apps/commands.h"
#include "apps/media_files.h"
#include "parvl/exec/generator.h"
#include "parvl/train/data.h"
#include "parvl/train/progress.h"

namespace parvl {
namespace {

constexpr int64_t kSpareTokens = 16;   // beyond what the right answer can take at most, one token a byte
constexpr size_t kCachedImages = 64;   // data sets ask several questions about an image in a row
constexpr double kSecondsBetween = 2;  // lines of progress; a silence of 5 s would look like a hang

struct EvalFlags {
  std::string model, data;
  int64_t limit = 0;
  GeneratorOptions generator;
  bool json = false;
};

// Tells on standard error how far the work is, from a thread of its own: loading and long answers do not make it
// silent.
class Ticker {
 public:
  Ticker(const Clock& clock, bool terminal) : clock_(clock), terminal_(terminal), start_(clock.now_seconds()) {
    thread_ = std::thread([this] { run(); });
  }
  ~Ticker() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    thread_.join();
    if (terminal_ && drawn_ > 0) std::fprintf(stderr, "\r%*s\r", drawn_, "");
  }

  void begin(int64_t total) {
    const std::lock_guard<std::mutex> lock(mutex_);
    total_ = total;
    start_ = clock_.now_seconds();
  }
  void done(int64_t count, int64_t right) {
    const std::lock_guard<std::mutex> lock(mutex_);
    done_ = count;
    right_ = right;
  }

 private:
  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto period = std::chrono::duration<double>(terminal_ ? 0.2 : kSecondsBetween);
    while (!wake_.wait_for(lock, period, [this] { return stop_; })) show();
  }

  void show() {
    const double seconds = clock_.now_seconds() - start_;
    std::string text = absl::StrCat("loading, ", format_duration(seconds));
    if (total_ > 0) text = absl::StrCat("sample ", done_, "/", total_);
    if (done_ > 0) {
      char accuracy[32];
      std::snprintf(accuracy, sizeof accuracy, "%.4f", static_cast<double>(right_) / static_cast<double>(done_));
      const double left = seconds / static_cast<double>(done_) * static_cast<double>(total_ - done_);
      absl::StrAppend(&text, "  accuracy ", accuracy, "  eta ", format_duration(left));
    }
    if (terminal_) {
      std::fprintf(stderr, "\r%-*s", drawn_, text.c_str());
      drawn_ = static_cast<int>(text.size());
    } else {
      std::fprintf(stderr, "%s\n", text.c_str());
    }
    std::fflush(stderr);
  }

  const Clock& clock_;
  const bool terminal_;
  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  int drawn_ = 0;
  double start_;
  int64_t total_ = 0, done_ = 0, right_ = 0;
};

std::string text_of(const Message& message) {
  std::string text;
  for (const ContentPart& part : message.content) {
    if (part.kind == ContentPart::Kind::kText) text += part.text;
  }
  return std::string(absl::StripAsciiWhitespace(text));
}

// A sample as a question: the turns before the last assistant turn, that turn's text, and the images of the question.
struct Question {
  std::vector<Message> messages;
  std::vector<std::string> image_paths;
  std::string answer;
  bool yes_no() const { return absl::EqualsIgnoreCase(answer, "yes") || absl::EqualsIgnoreCase(answer, "no"); }
};

absl::StatusOr<Question> make_question(const RawSample& sample) {
  auto last = std::find_if(sample.messages.rbegin(), sample.messages.rend(),
                           [](const Message& message) { return message.role == "assistant"; });
  if (last == sample.messages.rend()) {
    return invalid(sample.name, " has no assistant turn to compare an answer with");
  }
  Question question;
  question.answer = text_of(*last);
  question.messages.assign(sample.messages.begin(), std::prev(last.base()));
  for (Message& message : question.messages) {
    for (ContentPart& part : message.content) {
      if (part.kind != ContentPart::Kind::kImage) continue;
      question.image_paths.push_back(sample.image_paths[static_cast<size_t>(part.image_index)]);
      part.image_index = static_cast<int>(question.image_paths.size()) - 1;
    }
  }
  if (question.messages.empty())
    return invalid(sample.name, " begins with the assistant turn, so there is nothing to ask");
  return question;
}

class Examiner {
 public:
  explicit Examiner(Generator& generator) : generator_(generator) {}

  // Whether the greedy answer is the right one, blanks at its ends aside.
  absl::StatusOr<bool> ask(const Question& question) {
    PARVL_ASSIGN_OR_RETURN(auto images, read_images(question.image_paths));
    PARVL_ASSIGN_OR_RETURN(const Prompt prompt, generator_.prompts().build(question.messages, std::move(images), {}));
    SamplingParams greedy;
    greedy.temperature = 0;
    greedy.max_tokens = static_cast<int64_t>(question.answer.size()) + kSpareTokens;
    PARVL_ASSIGN_OR_RETURN(const GenerateResult result, generator_.generate(prompt, greedy, {}));
    return absl::StripAsciiWhitespace(result.text) == question.answer;
  }

 private:
  using Images = std::vector<std::shared_ptr<const ProcessedImage>>;

  absl::StatusOr<Images> read_images(const std::vector<std::string>& paths) {
    if (cache_.size() > kCachedImages) cache_.clear();
    Images images;
    for (const std::string& path : paths) {
      auto& slot = cache_[path];
      if (slot == nullptr) {
        PARVL_ASSIGN_OR_RETURN(const Images read, read_image_files({path}, generator_.prompts()));
        slot = read[0];
      }
      images.push_back(slot);
    }
    return images;
  }

  Generator& generator_;
  std::map<std::string, std::shared_ptr<const ProcessedImage>> cache_;
};

struct Count {
  int64_t n = 0, right = 0;
  void add(bool is_right) {
    ++n;
    right += is_right;
  }
  double share() const { return static_cast<double>(right) / static_cast<double>(n); }
};

void print_result(const EvalFlags& flags, const Count& all, const Count& open) {
  if (flags.json) {
    const Json json = {{"accuracy", all.share()},
                       {"accuracy_not_yes_no", open.n > 0 ? Json(open.share()) : Json()},
                       {"n", all.n},
                       {"n_not_yes_no", open.n}};
    std::printf("%s\n", json.dump().c_str());
    return;
  }
  std::printf("accuracy %.4f (%ld of %ld)\n", all.share(), all.right, all.n);
  if (open.n > 0) {
    std::printf("accuracy %.4f (%ld of %ld) of the answers that are not yes or no\n", open.share(), open.right, open.n);
  }
}

absl::Status run_eval(const EvalFlags& flags, const Context& context) {
  if (flags.limit < 0) return invalid("--limit is ", flags.limit, "; it must be at least 0 (0: all samples)");
  Count all, open;
  {
    Ticker ticker(context.clock, isatty(STDERR_FILENO) != 0);
    PARVL_ASSIGN_OR_RETURN(const auto data, Dataset::load(flags.data, std::filesystem::current_path().string()));
    const int64_t count = flags.limit > 0 ? std::min(flags.limit, data->size()) : data->size();
    std::vector<Question> questions;  // before the model is loaded: a bad sample is known at once
    for (int64_t i = 0; i < count; ++i) {
      PARVL_ASSIGN_OR_RETURN(Question question, make_question(data->sample(i)));
      questions.push_back(std::move(question));
    }
    PARVL_ASSIGN_OR_RETURN(const auto generator, Generator::load(flags.model, flags.generator));
    Examiner examiner(*generator);
    ticker.begin(count);
    for (const Question& question : questions) {
      const absl::StatusOr<bool> right = examiner.ask(question);
      if (!right.ok()) return with_context(right.status(), data->sample(all.n).name);
      all.add(*right);
      if (!question.yes_no()) open.add(*right);
      ticker.done(all.n, all.right);
    }
  }
  print_result(flags, all, open);
  return absl::OkStatus();
}

}  // namespace

void add_eval_command(CLI::App& app, Context& context) {
  auto flags = std::make_shared<EvalFlags>();
  CLI::App* command = app.add_subcommand("eval", "Counts right greedy answers on a data set");
  named(command->add_option("--model", flags->model, "Model directory"))->required();
  named(command->add_option("--data", flags->data, "easy-vqa:test, or FILE.jsonl as for training"))->required();
  command->add_option("--limit", flags->limit, "Only the first N samples; 0, the default: all");
  command->add_option("--device", flags->generator.load.device, "auto, cpu or cuda")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
  command
      ->add_option("--dtype", flags->generator.load.dtype,
                   "auto (the directory's), float32, bfloat16, float16 or float64")
      ->check(CLI::IsMember({"auto", "float32", "bfloat16", "float16", "float64"}));
  command->add_flag("--json", flags->json, "One JSON object: accuracy, accuracy_not_yes_no, n, n_not_yes_no");
  flags->generator.clock = &context.clock;
  run_with(*command, context, [flags, &context] { return run_eval(*flags, context); });
}

}  // namespace parvl
