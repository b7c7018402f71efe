#include "parvl/serve/pools/stream_client.h"

#include <grpcpp/grpcpp.h>

#include <condition_variable>
#include <mutex>
#include <utility>

#include "parvl/serve/pools/stream_server.h"
#include "proto/instance.grpc.pb.h"

namespace parvl {

class StreamClient::Impl final : public grpc::ClientBidiReactor<wire::FromInstance, wire::ToInstance> {
 public:
  Impl(const std::string& address, const std::string& token, int64_t instance, int64_t epoch, Handlers handlers)
      : instance_(instance), epoch_(epoch), handlers_(std::move(handlers)) {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
    const auto channel = grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
    stub_ = wire::Gateway::NewStub(channel);
    context_.AddMetadata("parvl-token", token);
    stub_->async()->Attach(&context_, this);
    StartRead(&incoming_);
    AddHold();  // for writes that other threads start
    StartCall();
  }

  void add(std::initializer_list<wire::Said> said) {
    std::lock_guard lock(mutex_);
    for (const wire::Said& one : said) *waiting_.add_said() = one;
  }

  void flush(const wire::Counts* counts) {
    std::lock_guard lock(mutex_);
    if (counts != nullptr) *waiting_.mutable_counts() = *counts;
    flush_ = true;
    if (!writing_ && !over_) write();
  }

  void end() {
    context_.TryCancel();
    std::unique_lock lock(mutex_);
    leave(lock);
    gone_.wait(lock, [this] { return done_; });
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      std::unique_lock lock(mutex_);
      return leave(lock);
    }
    handlers_.message(incoming_);
    incoming_.Clear();
    StartRead(&incoming_);
  }

  void OnWriteDone(bool ok) override {
    std::unique_lock lock(mutex_);
    writing_ = false;
    if (!ok) return leave(lock);
    if (flush_ && !over_) write();
  }

  void OnDone(const grpc::Status& status) override {
    handlers_.closed(absl::UnavailableError(status.error_message()));
    std::lock_guard lock(mutex_);
    done_ = true;
    gone_.notify_all();
  }

 private:
  // With the mutex.
  void write() {
    flush_ = false;
    outgoing_.Clear();
    outgoing_.Swap(&waiting_);
    outgoing_.set_instance(instance_);
    outgoing_.set_epoch(epoch_);
    writing_ = true;
    StartWrite(&outgoing_);
  }

  void leave(std::unique_lock<std::mutex>& lock) {
    if (std::exchange(over_, true)) return;
    lock.unlock();
    RemoveHold();
    lock.lock();
  }

  const int64_t instance_, epoch_;
  const Handlers handlers_;
  grpc::ClientContext context_;
  std::unique_ptr<wire::Gateway::Stub> stub_;
  wire::ToInstance incoming_;
  std::mutex mutex_;
  std::condition_variable gone_;
  wire::FromInstance waiting_, outgoing_;
  bool writing_ = false, flush_ = false, over_ = false, done_ = false;
};

std::unique_ptr<StreamClient> StreamClient::attach(const std::string& address, const std::string& token,
                                                   int64_t instance, int64_t epoch, Handlers handlers) {
  return std::unique_ptr<StreamClient>(
      new StreamClient(std::make_unique<Impl>(address, token, instance, epoch, std::move(handlers))));
}

StreamClient::StreamClient(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
StreamClient::~StreamClient() { impl_->end(); }
void StreamClient::add(wire::Said said) { impl_->add({std::move(said)}); }
void StreamClient::add(std::initializer_list<wire::Said> said) { impl_->add(said); }
void StreamClient::flush() { impl_->flush(nullptr); }
void StreamClient::flush(const wire::Counts& counts) { impl_->flush(&counts); }

}  // namespace parvl
