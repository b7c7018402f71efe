#include "tests/unit/serve_fake.h"

#include <chrono>
#include <filesystem>

#include "parvl/base/check.h"
#include "parvl/base/file.h"
#include "parvl/base/json.h"

namespace parvl {
namespace {

constexpr TokenId kEnd = 257;

// How a byte-level vocabulary spells byte `b`: itself where it is printable, else a letter from U+0100 on.
std::vector<std::string> byte_spelling() {
  std::vector<std::string> out(256);
  int next = 0x100;
  for (int b = 0; b < 256; ++b) {
    const bool plain = (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || (b >= 0xae && b <= 0xff);
    const int code = plain ? b : next++;
    if (code < 0x80) {
      out[b] = static_cast<char>(code);
    } else {
      out[b] = {static_cast<char>(0xc0 | code >> 6), static_cast<char>(0x80 | (code & 0x3f))};
    }
  }
  return out;
}

Json tokenizer_json() {
  Json vocab = Json::object();
  const auto spelling = byte_spelling();
  for (int b = 0; b < 256; ++b) vocab[spelling[b]] = b;
  Json added = Json::array();
  int id = 256;
  for (const char* content : {"<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"}) {
    added.push_back({{"id", id++},
                     {"content", content},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", true}});
  }
  const Json byte_level = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", false}, {"use_regex", false}};
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", added},
          {"normalizer", nullptr},
          {"pre_tokenizer", byte_level},
          {"post_processor", byte_level},
          {"decoder", byte_level},
          {"model",
           {{"type", "BPE"},
            {"dropout", nullptr},
            {"unk_token", nullptr},
            {"continuing_subword_prefix", ""},
            {"end_of_word_suffix", ""},
            {"fuse_unk", false},
            {"byte_fallback", false},
            {"vocab", vocab},
            {"merges", Json::array()}}}};
}

constexpr char kTemplate[] =
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

void write_json(const std::string& path, const Json& json) {
  PARVL_CHECK(write_file_atomically(path, json.dump()).ok(), "cannot write a test file");
}

}  // namespace

void write_model_folder(const std::string& path, bool images) {
  std::filesystem::create_directories(path);
  write_json(path + "/tokenizer.json", tokenizer_json());
  write_json(path + "/tokenizer_config.json", {{"eos_token", "<|im_end|>"}, {"pad_token", "<|im_end|>"}});
  PARVL_CHECK(write_file_atomically(path + "/chat_template.jinja", kTemplate).ok(), "cannot write a test file");
  Json config = {{"model_type", images ? "qwen2_vl" : "qwen2"},
                 {"architectures", {images ? "Qwen2VLForConditionalGeneration" : "Qwen2ForCausalLM"}},
                 {"eos_token_id", 257}};
  if (images) {
    config.update({{"image_token_id", 260},
                   {"video_token_id", 261},
                   {"vision_start_token_id", 258},
                   {"vision_end_token_id", 259}});
    write_json(path + "/preprocessor_config.json", {{"image_processor_type", "Qwen2VLImageProcessor"},
                                                    {"patch_size", 4},
                                                    {"temporal_patch_size", 2},
                                                    {"merge_size", 2},
                                                    {"min_pixels", 64},
                                                    {"max_pixels", 4096},
                                                    {"do_resize", true},
                                                    {"do_rescale", true},
                                                    {"do_normalize", true},
                                                    {"rescale_factor", 1.0 / 255},
                                                    {"image_mean", {0.5, 0.5, 0.5}},
                                                    {"image_std", {0.5, 0.5, 0.5}},
                                                    {"resample", 3},
                                                    {"do_convert_rgb", true}});
  }
  write_json(path + "/config.json", config);
}

bool FakeScript::wait_for(const std::function<bool()>& condition) {
  std::unique_lock lock(mutex);
  return changed.wait_for(lock, std::chrono::seconds(20), condition);
}

FakeEngine::FakeEngine(std::shared_ptr<FakeScript> script, const std::string& folder, int64_t max_model_len)
    : script_(std::move(script)), max_model_len_(max_model_len) {
  auto prompts = PromptBuilder::load(folder);
  PARVL_CHECK(prompts.ok(), std::string(prompts.status().message()).c_str());
  prompts_ = *prompts;
  grammars_ = std::make_unique<GrammarCompiler>(prompts_->tokenizer(), std::vector<TokenId>{kEnd});
  defaults_.temperature = 0.5;  // as a generation_config.json would say
  thread_ = std::thread([this] { loop(); });
}

FakeEngine::~FakeEngine() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  arrived_.notify_all();
  thread_.join();
}

RequestId FakeEngine::submit(EngineRequest request) {
  std::lock_guard lock(mutex_);
  const RequestId id{next_id_++};
  jobs_.push_back({id, std::move(request)});
  arrived_.notify_all();
  return id;
}

void FakeEngine::cancel(RequestId id) {
  std::lock_guard lock(mutex_);
  for (Job& job : jobs_) job.cancelled |= job.id == id;
}

absl::Status FakeEngine::accepts_images() const {
  std::lock_guard lock(script_->mutex);
  return script_->images_refused;
}

absl::Status FakeEngine::will_accept() const {
  std::lock_guard lock(script_->mutex);
  return script_->gone;
}

void FakeEngine::watch_capacity(std::function<void()> changed) {
  std::lock_guard lock(script_->mutex);
  script_->capacity_changed = std::move(changed);
}

EngineStats FakeEngine::stats() const {
  std::lock_guard lock(script_->mutex);
  return script_->stats;
}

bool FakeEngine::stopped(const Job& job) {
  std::lock_guard lock(mutex_);
  return stopping_ || job.cancelled;
}

void FakeEngine::loop() {
  for (;;) {
    Job* job = nullptr;
    {
      std::unique_lock lock(mutex_);
      arrived_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      job = &jobs_.front();
    }
    job->request.on_end(stopped(*job) ? GenerateResult{} : generate(*job));
    std::lock_guard lock(mutex_);
    jobs_.pop_front();
  }
}

absl::StatusOr<GenerateResult> FakeEngine::generate(Job& job) {
  {
    std::lock_guard lock(script_->mutex);
    script_->prompts.push_back(*job.request.prompt);
    script_->samplings.push_back(job.request.sampling);
    script_->priorities.push_back(job.request.priority);
    script_->salts.push_back(job.request.cache_salt);
    script_->grammars.push_back(job.request.grammar);
    ++script_->started;
    script_->changed.notify_all();
  }
  auto result = speak(job);
  std::lock_guard lock(script_->mutex);
  ++script_->ended;
  if (result.ok() && result->finish == FinishReason::kNone) ++script_->cancelled;
  script_->changed.notify_all();
  if (!result.ok()) return result;
  result->prompt_tokens = static_cast<int64_t>(job.request.prompt->ids.size());
  result->cached_tokens = script_->cached_tokens++;
  return result;
}

absl::StatusOr<GenerateResult> FakeEngine::speak(Job& job) {
  const SamplingParams& sampling = job.request.sampling;
  GenerateResult result;
  for (int64_t n = 0;; ++n) {
    TokenEvent event;
    {
      std::unique_lock lock(script_->mutex);
      if (script_->fail_after == n) return script_->error;
      script_->changed.wait(lock, [&] { return script_->allowed > 0; });
      --script_->allowed;
      script_->changed.notify_all();
      const size_t count = script_->pieces.size();
      const bool ends = !script_->endless && static_cast<size_t>(n) == count;
      if (!ends) event.text = script_->pieces[static_cast<size_t>(n) % count];
      event.token_id = ends ? kEnd : event.text.empty() ? 0 : static_cast<unsigned char>(event.text[0]);
      event.finish = ends ? FinishReason::kStop : FinishReason::kNone;
    }
    if (sampling.max_tokens == n + 1 && event.finish == FinishReason::kNone) event.finish = FinishReason::kLength;
    if (sampling.logprobs) {
      event.logprob = {event.token_id, -0.5f, {}};
      for (TokenId id = 0; id < sampling.top_logprobs; ++id) event.logprob.top.emplace_back(id + 200, -1.0f - id);
    }
    result.token_ids.push_back(event.token_id);
    result.text += event.text;
    if (stopped(job)) return result;
    job.request.on_token(event);
    result.finish = event.finish;
    if (event.finish != FinishReason::kNone) return result;
  }
}

}  // namespace parvl
