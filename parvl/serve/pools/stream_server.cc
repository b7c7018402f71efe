#include "parvl/serve/pools/stream_server.h"

#include <absl/container/flat_hash_map.h>
#include <grpc/support/time.h>
#include <grpcpp/grpcpp.h>
#include <openssl/crypto.h>

#include <condition_variable>
#include <mutex>
#include <utility>

#include "proto/instance.grpc.pb.h"

namespace parvl {

class StreamServer::Impl final : public wire::Gateway::CallbackService {
 public:
  Impl(std::string token, Handlers handlers) : token_(std::move(token)), handlers_(std::move(handlers)) {}

  absl::Status listen() {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    if (server_ == nullptr || port == 0) {
      return absl::UnavailableError("cannot listen on the loopback for the instances");
    }
    address_ = absl::StrCat("127.0.0.1:", port);
    return absl::OkStatus();
  }

  void shut_down() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    if (server_ == nullptr) return;
    server_->Shutdown(gpr_inf_past(GPR_CLOCK_REALTIME));  // cancels what still runs
    server_->Wait();
    std::unique_lock lock(mutex_);
    none_left_.wait(lock, [this] { return streams_.empty(); });
  }

  grpc::ServerBidiReactor<wire::FromInstance, wire::ToInstance>* Attach(grpc::CallbackServerContext* context) override;

  void send(StreamId id, wire::Command command);
  void close(StreamId id);
  const std::string& address() const { return address_; }

 private:
  class Stream;
  friend class Stream;

  bool shows_token(const grpc::CallbackServerContext& context) const {
    const auto found = context.client_metadata().find("parvl-token");
    return found != context.client_metadata().end() && found->second.size() == token_.size() &&
           CRYPTO_memcmp(found->second.data(), token_.data(), token_.size()) == 0;
  }

  const std::string token_;
  const Handlers handlers_;
  std::unique_ptr<grpc::Server> server_;
  std::string address_;
  mutable std::mutex mutex_;
  std::condition_variable none_left_;
  bool stopping_ = false;
  int64_t next_ = 1;
  absl::flat_hash_map<StreamId, Stream*> streams_;
};

// One instance's. gRPC keeps it alive until OnDone.
class StreamServer::Impl::Stream final : public grpc::ServerBidiReactor<wire::FromInstance, wire::ToInstance> {
 public:
  Stream(Impl& server, StreamId id, grpc::CallbackServerContext* context)
      : server_(server), id_(id), context_(context) {}

  void begin() { StartRead(&incoming_); }

  void send(wire::Command command) {
    std::lock_guard lock(mutex_);
    if (finished_) return;
    *waiting_.add_commands() = std::move(command);
    if (!writing_) write();
  }

  void close() { context_->TryCancel(); }

  void OnReadDone(bool ok) override {
    if (!ok) return finish();
    server_.handlers_.message(id_, std::exchange(incoming_, {}));
    StartRead(&incoming_);
  }

  void OnWriteDone(bool ok) override {
    std::lock_guard lock(mutex_);
    writing_ = false;
    if (ok && !finished_ && waiting_.commands_size() > 0) write();
  }

  void OnCancel() override { finish(); }

  void OnDone() override {
    server_.handlers_.closed(id_);
    std::lock_guard lock(server_.mutex_);
    server_.streams_.erase(id_);
    server_.none_left_.notify_all();
    delete this;
  }

 private:
  // With the mutex.
  void write() {
    outgoing_.Clear();
    outgoing_.Swap(&waiting_);
    writing_ = true;
    StartWrite(&outgoing_);
  }

  void finish() {
    {
      std::lock_guard lock(mutex_);
      if (std::exchange(finished_, true)) return;
    }
    Finish(grpc::Status::CANCELLED);
  }

  Impl& server_;
  const StreamId id_;
  grpc::CallbackServerContext* const context_;
  wire::FromInstance incoming_;
  std::mutex mutex_;
  wire::ToInstance waiting_, outgoing_;
  bool writing_ = false, finished_ = false;
};

namespace {

// Refuses at once.
class Refusal final : public grpc::ServerBidiReactor<wire::FromInstance, wire::ToInstance> {
 public:
  explicit Refusal(const grpc::Status& status) { Finish(status); }
  void OnDone() override { delete this; }
};

}  // namespace

grpc::ServerBidiReactor<wire::FromInstance, wire::ToInstance>* StreamServer::Impl::Attach(
    grpc::CallbackServerContext* context) {
  if (!shows_token(*context)) {
    return new Refusal({grpc::StatusCode::UNAUTHENTICATED, "the run's token is needed"});
  }
  std::unique_lock lock(mutex_);
  if (stopping_) return new Refusal({grpc::StatusCode::UNAVAILABLE, "the gateway is shutting down"});
  const StreamId id{next_++};
  auto* stream = new Stream(*this, id, context);
  streams_.emplace(id, stream);
  lock.unlock();
  stream->begin();
  return stream;
}

// The lock of the table is held meanwhile, so that the stream stays.
void StreamServer::Impl::send(StreamId id, wire::Command command) {
  std::lock_guard lock(mutex_);
  if (const auto found = streams_.find(id); found != streams_.end()) found->second->send(std::move(command));
}

void StreamServer::Impl::close(StreamId id) {
  std::lock_guard lock(mutex_);
  if (const auto found = streams_.find(id); found != streams_.end()) found->second->close();
}

absl::StatusOr<std::unique_ptr<StreamServer>> StreamServer::listen(const std::string& token, Handlers handlers) {
  auto impl = std::make_unique<Impl>(token, std::move(handlers));
  PARVL_RETURN_IF_ERROR(impl->listen());
  return std::unique_ptr<StreamServer>(new StreamServer(std::move(impl)));
}

StreamServer::StreamServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
StreamServer::~StreamServer() { impl_->shut_down(); }
const std::string& StreamServer::address() const { return impl_->address(); }
void StreamServer::send(StreamId stream, wire::Command command) { impl_->send(stream, std::move(command)); }
void StreamServer::close(StreamId stream) { impl_->close(stream); }

}  // namespace parvl
