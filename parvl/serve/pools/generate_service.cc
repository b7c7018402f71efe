#include "parvl/serve/pools/generate_service.h"

#include <atomic>

#include "parvl/elastic/instance_id.h"
#include "parvl/serve/pools/pixels.h"
#include "parvl/serve/pools/wire.h"

namespace parvl {
namespace {

constexpr double kPull_s = 10;  // for one image's pixels or features, or for keys and values
constexpr int kSick = 3;        // requests that failed inside, one after the other

wire::Said ended(const std::pair<int64_t, int32_t>& of, const absl::StatusOr<GenerateResult>& result) {
  wire::Said said;
  said.mutable_ended()->set_request(of.first);
  said.mutable_ended()->set_attempt(of.second);
  write_result(result, *said.mutable_ended());
  return said;
}

}  // namespace

class GenerateService::Output : public EncodedSource {
 public:
  Output(TransferHandle handle, TransferSink& sink) : handle_(std::move(handle)), sink_(sink) {}

  const std::vector<TransferTensor>& tensors() const override { return handle_.tensors; }
  absl::Status fetch(absl::Span<const absl::Span<std::byte>> out) override {
    const absl::Status status = sink_.pull_into(handle_, out, kPull_s).status();
    if (!status.ok()) failed_ = true;
    return status;
  }
  bool failed() const { return failed_; }

 private:
  const TransferHandle handle_;
  TransferSink& sink_;
  std::atomic<bool> failed_ = false;
};

class GenerateService::Given : public KvSource {
 public:
  Given(TransferHandle handle, int64_t tokens, TransferSink& sink)
      : handle_(std::move(handle)), tokens_(tokens), sink_(sink) {}

  int64_t tokens() const override { return tokens_; }
  const std::vector<TransferTensor>& tensors() const override { return handle_.tensors; }
  absl::Status fetch(const Take& take) override {
    const auto view = sink_.pull(handle_, kPull_s);
    if (!view.ok()) return view.status();
    std::vector<const std::byte*> data;
    for (size_t i = 0; i < view->tensors().size(); ++i) data.push_back(view->data(i));
    take(data);
    return absl::OkStatus();
  }

 private:
  const TransferHandle handle_;
  const int64_t tokens_;
  TransferSink& sink_;
};

GenerateService::GenerateService(std::unique_ptr<Engine> engine, TransferSink& sink, StreamClient& stream,
                                 std::unique_ptr<KvShelf> shelf)
    : sink_(sink), stream_(stream), shelf_(std::move(shelf)), engine_(std::move(engine)) {}

GenerateService::~GenerateService() {
  std::lock_guard lock(mutex_);
  for (auto& [of, live] : live_) live.stop.request_stop();
}

void GenerateService::fail(const Attempt& of, const absl::Status& status) {
  {
    std::lock_guard lock(mutex_);
    live_.erase(of);
  }
  stream_.add(ended(of, status));
  stream_.flush();
}

absl::Status GenerateService::attach_outputs(const wire::Generate& message, EngineRequest& request) {
  if (!message.kv_at().empty()) {
    PARVL_ASSIGN_OR_RETURN(TransferHandle handle, TransferHandle::decode(message.kv_at()));
    request.kv = std::make_shared<Given>(std::move(handle), message.kv_tokens(), sink_);
  }
  for (int i = 0; i < message.images_size(); ++i) {
    if (message.images(i).output_at().empty()) continue;
    PARVL_ASSIGN_OR_RETURN(TransferHandle handle, TransferHandle::decode(message.images(i).output_at()));
    request.encoded.resize(static_cast<size_t>(message.images_size()));
    request.encoded[static_cast<size_t>(i)] = std::make_shared<Output>(std::move(handle), sink_);
  }
  return absl::OkStatus();
}

void GenerateService::generate(const wire::Generate& message) {
  Job job;
  job.of = {message.request(), message.attempt()};
  auto request = read_request(message);
  if (!request.ok()) return fail(job.of, request.status());
  if (const absl::Status status = attach_outputs(message, *request); !status.ok()) return fail(job.of, status);
  tell_gateway(job.of, *request);
  job.request = *std::move(request);
  job.grammar = message.grammar();
  job.needs_room = message.hand_over() && shelf_ != nullptr;
  for (const wire::Image& image : message.images()) job.pixels.push_back(image.pixels_at());
  {
    std::lock_guard lock(mutex_);
    job.stop = live_[job.of].stop.get_token();
  }
  make_ready(std::move(job));
}

// Its last token and its end are one thing to say: nobody may take an answer for cut that was whole.
void GenerateService::tell_gateway(const Attempt& of, EngineRequest& request) {
  auto last = std::make_shared<std::optional<wire::Said>>();
  request.on_token = [this, of, last](const TokenEvent& event) {
    wire::Said said;
    said.mutable_token()->set_request(of.first);
    said.mutable_token()->set_attempt(of.second);
    write_token(event, *said.mutable_token());
    if (event.finish == FinishReason::kNone) {
      stream_.add(std::move(said));
    } else {
      *last = std::move(said);
    }
  };
  request.on_end = [this, of, last, outputs = request.encoded,
                    given = request.kv != nullptr](const absl::StatusOr<GenerateResult>& result) {
    wire::Said end = ended(of, result);
    end.mutable_ended()->set_kv_lost(given && absl::IsUnavailable(result.status()));
    for (size_t i = 0; i < outputs.size(); ++i) {
      const auto* output = static_cast<const Output*>(outputs[i].get());
      if (output != nullptr && output->failed()) end.mutable_ended()->add_not_fetched(static_cast<int32_t>(i));
    }
    tell_if_sick(result.status());
    if (result.ok() && result->handed_over) return hand_over(of, std::move(end));
    if (last->has_value()) {
      stream_.add({**last, end});
    } else {
      stream_.add(std::move(end));
    }
    std::lock_guard lock(mutex_);
    live_.erase(of);
  };
}

// Steps that fail one after the other, whoever's they are: a device that is lost says so for ever, and an instance that
// fails at once is the one that is never busy.
void GenerateService::tell_if_sick(const absl::Status& status) {
  if (status.code() != absl::StatusCode::kInternal) {
    if (status.ok()) failures_ = 0;
    return;
  }
  if (++failures_ != kSick) return;
  wire::Said said;
  write_failure(absl::InternalError(absl::StrCat(
                    kSick, " requests failed in it one after the other, the last with: ", status.message())),
                *said.mutable_refused());
  stream_.add(std::move(said));
}

// First its pixels, then its grammar, then room for what it leaves; then it goes to the engine.
void GenerateService::make_ready(Job job) {
  const bool fetches =
      std::any_of(job.pixels.begin(), job.pixels.end(), [](const std::string& handle) { return !handle.empty(); });
  if (fetches) return fetcher_.submit([this, job = std::move(job)]() mutable { fetch_pixels(std::move(job)); });
  if (!job.grammar.empty()) {
    return compiler_.submit([this, job = std::move(job)]() mutable { compile(std::move(job)); });
  }
  if (!job.needs_room) return start(std::move(job));
  rooms_.submit([this, job = std::move(job)]() mutable { find_room(std::move(job)); });
}

void GenerateService::fetch_pixels(Job job) {
  auto prompt = std::make_shared<Prompt>(*job.request.prompt);
  for (size_t i = 0; i < job.pixels.size(); ++i) {
    if (job.pixels[i].empty()) continue;
    if (job.stop.stop_requested()) return fail(job.of, absl::CancelledError("cancelled"));
    auto image = std::make_shared<ProcessedImage>(*prompt->images[i]);
    if (const absl::Status status = pull_pixels(sink_, job.pixels[i], kPull_s, *image); !status.ok()) {
      return fail(job.of, absl::UnavailableError(absl::StrCat("image ", i + 1, " did not come: ", status.message())));
    }
    prompt->images[i] = std::move(image);
  }
  job.request.prompt = std::move(prompt);
  job.pixels.clear();
  make_ready(std::move(job));
}

void GenerateService::compile(Job job) {
  auto grammar = engine_->grammars().compile(job.grammar, job.stop);
  if (!grammar.ok()) return fail(job.of, grammar.status());
  job.request.grammar = *std::move(grammar);
  job.grammar.clear();
  make_ready(std::move(job));
}

void GenerateService::find_room(Job job) {
  const size_t tokens = job.request.prompt->ids.size() + job.request.generated.size();
  auto room = shelf_->make_room(engine_->kv_layout(static_cast<int64_t>(tokens)), job.stop);
  if (!room.ok()) return fail(job.of, room.status());
  {
    std::lock_guard lock(mutex_);
    live_[job.of].room = *room;
  }
  job.request.kv_room = *std::move(room);
  start(std::move(job));
}

void GenerateService::start(Job job) {
  const Attempt of = job.of;
  {
    std::lock_guard lock(mutex_);
    Live& live = live_[of];
    if (!job.stop.stop_requested()) {
      live.id = engine_->submit(std::move(job.request));
      return;
    }
  }
  fail(of, absl::CancelledError("cancelled"));
}

void GenerateService::cancel(const wire::Cancel& message) {
  std::lock_guard lock(mutex_);
  const Attempt of{message.request(), message.attempt()};
  const auto found = live_.find(of);
  if (found == live_.end()) {  // its end, which nobody waits for any more, is on its way
    if (shelf_ != nullptr) shelf_->let_go(of);
    return;
  }
  found->second.stop.request_stop();
  if (found->second.id.has_value()) engine_->cancel(*found->second.id);
}

// On the engine's thread: its sum is taken over all of it, which takes a while.
void GenerateService::hand_over(const Attempt& of, wire::Said end) {
  publisher_.submit([this, of, end = std::move(end)]() mutable {
    std::shared_ptr<KvRoom> room;
    {
      std::lock_guard lock(mutex_);
      room = live_.at(of).room;
    }
    end.mutable_ended()->set_kv(shelf_->publish(of, *room));
    bool wanted;
    {
      std::lock_guard lock(mutex_);
      wanted = !live_.extract(of).mapped().stop.stop_requested();
    }
    if (!wanted) return shelf_->let_go(of);  // nobody waits for its end either
    stream_.add(std::move(end));
    stream_.flush();
  });
}

void GenerateService::let_go_kv(const wire::Cancel& message) {
  if (shelf_ != nullptr) shelf_->let_go({message.request(), message.attempt()});
}

void GenerateService::fence(const wire::Fence& message) {
  if (shelf_ != nullptr) shelf_->fence(instance_name(InstanceId{message.instance()}), message.epoch());
}

}  // namespace parvl
