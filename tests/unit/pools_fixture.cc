#include "tests/unit/pools_fixture.h"

#include <unistd.h>

#include "parvl/base/check.h"
#include "parvl/base/checksum.h"

namespace parvl {
namespace {

class CountingEngine : public Engine {
 public:
  CountingEngine(std::shared_ptr<Script> script, size_t instance, const std::string& folder, EngineHooks hooks)
      : script_(std::move(script)),
        instance_(instance),
        hooks_(std::move(hooks)),
        prompts_(*PromptBuilder::load(folder)) {
    grammars_ = std::make_unique<GrammarCompiler>(prompts_->tokenizer(), std::vector<TokenId>{kEnd});
    thread_ = std::thread([this] { loop(); });
  }
  ~CountingEngine() override {
    {
      std::lock_guard lock(script_->mutex);
      stopping_ = true;
      script_->changed.notify_all();
    }
    thread_.join();
  }
  const PromptBuilder& prompts() const override { return *prompts_; }
  int64_t max_model_len() const override { return 1000; }
  int64_t max_running() const override { return 4; }
  int64_t kv_tokens() const override { return 4000; }
  SamplingParams default_sampling() const override { return {}; }
  std::string device_name() const override { return "test"; }
  GrammarCompiler& grammars() override { return *grammars_; }
  RequestId submit(EngineRequest request) override {
    std::lock_guard lock(script_->mutex);
    jobs_.push_back({RequestId{next_}, std::move(request)});
    script_->changed.notify_all();
    return RequestId{next_++};
  }
  void cancel(RequestId id) override {
    std::lock_guard lock(script_->mutex);
    for (Job& job : jobs_) job.cancelled |= job.id == id;
    script_->changed.notify_all();
  }
  EngineStats stats() const override { return {}; }
  // As large for every prompt as for the longest.
  std::vector<TransferTensor> kv_layout(int64_t) const override {
    std::vector<TransferTensor> out = {{.name = "keys and values", .shape = {10'000}}};
    PARVL_CHECK(place_tensors(out).ok(), "a layout that cannot be");
    return out;
  }

 private:
  struct Job {
    RequestId id;
    EngineRequest request;
    bool cancelled = false, hands_over = false;
    int64_t said = 0, seen = 0;  // tokens; what its images show
  };
  void loop() {
    std::unique_lock lock(script_->mutex);
    for (;;) {
      script_->changed.wait(lock, [this] {
        return stopping_ || std::any_of(jobs_.begin(), jobs_.end(), [&](const Job& job) {
                 return job.cancelled || script_->allowed[instance_] > 0;
               });
      });
      if (stopping_) break;
      for (auto job = jobs_.begin(); job != jobs_.end();) {
        const bool cancelled = job->cancelled;
        if (!cancelled && script_->allowed[instance_] <= 0) {
          ++job;
          continue;
        }
        --script_->allowed[instance_];
        lock.unlock();  // as in an engine: who is told takes locks of its own, under which it calls this one
        const bool ends = take_turn(*job, cancelled);
        lock.lock();
        job = ends ? jobs_.erase(job) : std::next(job);
      }
      lock.unlock();
      hooks_.on_turn();
      lock.lock();
    }
    lock.unlock();
    for (Job& job : jobs_) job.request.on_end(GenerateResult{});
  }
  // Whether that was its end.
  bool take_turn(Job& job, bool cancelled) {
    const absl::Status looked = job.said == 0 && !cancelled ? look(job) : absl::OkStatus();
    if (!looked.ok()) {
      job.request.on_end(looked);
      return true;
    }
    if (!cancelled && !speak(job)) return false;
    GenerateResult result;
    result.finish = cancelled || job.hands_over ? FinishReason::kNone : FinishReason::kStop;
    result.handed_over = job.hands_over;
    job.request.on_end(result);
    return true;
  }
  absl::Status look(Job& job) {
    if (job.request.kv != nullptr) {
      return job.request.kv->fetch([&job](absl::Span<const std::byte* const> data) {
        job.seen = static_cast<int64_t>(reinterpret_cast<const float*>(data[0])[9'999]);
      });
    }
    for (const auto& source : job.request.encoded) {
      const auto floats = static_cast<size_t>(source->tensors().front().bytes) / sizeof(float);
      std::vector<float> features(floats);
      const absl::Span<std::byte> out(reinterpret_cast<std::byte*>(features.data()), floats * sizeof(float));
      const absl::Status status = source->fetch({out});
      if (!status.ok()) return absl::UnavailableError(status.message());
      job.seen += static_cast<int64_t>(features.back());
    }
    return absl::OkStatus();
  }
  bool speak(Job& job) {
    const auto index = static_cast<int64_t>(job.request.generated.size()) + job.said++;
    const bool last = index + 1 == job.request.sampling.max_tokens;
    TokenEvent event;
    event.token_id =
        last ? kEnd : static_cast<TokenId>(static_cast<int64_t>(job.request.sampling.seed) + index + job.seen);
    event.text = last ? "" : std::to_string(event.token_id) + " ";
    event.finish = last ? FinishReason::kStop : FinishReason::kNone;
    job.request.on_token(event);
    job.hands_over = !last && job.request.kv_room != nullptr;
    if (job.hands_over) {  // what its images show is in them
      const absl::Span<std::byte> room = job.request.kv_room->pieces[0];
      std::fill_n(reinterpret_cast<float*>(room.data()), room.size() / sizeof(float), static_cast<float>(job.seen));
    }
    return last || job.hands_over;
  }

  const std::shared_ptr<Script> script_;
  const size_t instance_;
  const EngineHooks hooks_;
  const std::shared_ptr<const PromptBuilder> prompts_;
  std::unique_ptr<GrammarCompiler> grammars_;
  std::list<Job> jobs_;
  int64_t next_ = 1;
  bool stopping_ = false;
  std::thread thread_;
};

class FillingEncoder : public EncodeEngine {
 public:
  std::string device_name() const override { return "test"; }
  int64_t max_images() const override { return 4; }
  absl::StatusOr<std::vector<TransferTensor>> layout_of(const ProcessedImage& image) const override {
    std::vector<TransferTensor> out = {{.name = "visual", .shape = {image.num_tokens(), 16}}};
    PARVL_RETURN_IF_ERROR(place_tensors(out).status());
    return out;
  }
  absl::StatusOr<EncodeId> submit(EncodeRequest request) override {
    auto* const out = reinterpret_cast<float*>(request.destination[0].data());
    std::fill_n(out, request.destination[0].size() / sizeof(float), request.image->patches.front());
    request.on_done(EncodedImage{});
    return EncodeId{1};
  }
  void cancel(EncodeId) override {}
  EncodeStats stats() const override { return {}; }
};

}  // namespace

std::shared_ptr<const ProcessedImage> placed(PixelStore& store, ProcessedImage image) {
  const auto memory = *store.reserve(image);
  const size_t bytes = image.patches.size() * sizeof(float);
  PARVL_CHECK(::pwrite(memory->descriptor(), image.patches.data(), bytes, 0) == static_cast<ssize_t>(bytes),
              "no write");
  const uint64_t checksum = tensor_checksum(image.patches.data(), bytes, 0);
  image.patches.clear();
  PARVL_CHECK(memory->finish(checksum, image).ok(), "no place");
  return std::make_shared<const ProcessedImage>(std::move(image));
}

std::unique_ptr<EncodeEngine> filling_encoder() { return std::make_unique<FillingEncoder>(); }

std::unique_ptr<Engine> counting_engine(std::shared_ptr<Script> script, size_t instance, const std::string& folder,
                                        const EngineHooks& hooks) {
  return std::make_unique<CountingEngine>(std::move(script), instance, folder, hooks);
}

Threads::~Threads() {
  for (std::thread& thread : threads_) thread.join();
}

void Threads::start(const InstanceLaunch& launch) {
  {
    std::lock_guard lock(script_->mutex);
    gateway_ = launch.gateway;
    if (script_->dead[static_cast<size_t>(launch.instance.value)]) {
      return on_exit_(launch.instance, launch.epoch, "ended at once");
    }
  }
  threads_.emplace_back([this, launch] {
    WorkerLoaders loaders;
    loaders.engine = [&](const std::string&, const EngineOptions& options) -> absl::StatusOr<std::unique_ptr<Engine>> {
      std::lock_guard lock(script_->mutex);
      ++script_->started[static_cast<size_t>(launch.instance.value)];
      script_->changed.notify_all();
      if (script_->on_load) script_->on_load();
      if (!script_->refusal.ok()) return script_->refusal;
      return counting_engine(script_, static_cast<size_t>(launch.instance.value), folder_, options.hooks);
    };
    loaders.encoder = [&](const std::string&, const EngineOptions&) -> absl::StatusOr<std::unique_ptr<EncodeEngine>> {
      std::lock_guard lock(script_->mutex);
      ++script_->encoders[static_cast<size_t>(launch.instance.value)];
      if (!script_->encoder_refusal.ok()) return script_->encoder_refusal;
      return filling_encoder();
    };
    const absl::Status status =
        run_worker({launch.gateway, launch.token, launch.instance.value, launch.epoch}, loaders, kClock);
    on_exit_(launch.instance, launch.epoch, status.ok() ? "ended" : std::string(status.message()));
  });
}

}  // namespace parvl
