// A whole server over a real socket, with an engine that the test controls.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "parvl/serve/server.h"
#include "tests/unit/serve_client.h"
#include "tests/unit/serve_fake.h"

namespace parvl {

class ServerTest : public testing::Test {
 protected:
  ServerTest() {
    write_model_folder(folder_.path());
    options_.port = 0;
    options_.served_names = {"tiny", "alias"};
    options_.model_dir = "models/tiny";
    options_.version = "9.9";
    options_.seed = 1;
  }

  ~ServerTest() override { stop(); }

  void start() {
    start_with([this] { return std::make_unique<FakeEngine>(script_, folder_.path(), max_model_len_); });
    ASSERT_TRUE(ready_.get_future().wait_for(std::chrono::seconds(20)) == std::future_status::ready);
  }

  void start_with(Server::Loader load) {
    auto server = Server::listen(options_, clock_);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = std::move(*server);
    thread_ = std::thread([this, load] { result_ = server_->run(load, [this] { ready_.set_value(); }); });
  }

  void stop() {
    if (server_ == nullptr) return;
    script_->allow(1 << 30);
    server_->shutdown();
    join();
    server_.reset();
  }

  void join() {
    if (thread_.joinable()) thread_.join();
  }

  TestReply chat(const Json& body, const std::string& headers = "") {
    TestClient client(server_->port());
    return client.chat(body, headers);
  }
  TestReply get(const std::string& path, const std::string& headers = "") {
    TestClient client(server_->port());
    return client.get(path, headers);
  }

  // A generation that says "Hello!" only as far as it is allowed.
  void close_gate() {
    std::lock_guard lock(script_->mutex);
    script_->allowed = 0;
  }
  void open_gate() { script_->allow(1 << 30); }
  // Until so many requests are past admission (at most 20 s).
  bool wait_admitted(size_t count) {
    const int64_t end = clock_.now_ns() + 20'000'000'000;
    while (server_->admitted() != count && clock_.now_ns() < end) std::this_thread::yield();
    return server_->admitted() == count;
  }
  // A generation that has begun and says nothing yet: asks for a stream with the gate closed.
  void begin_gated_stream(TestClient& client) {
    close_gate();
    Json body = user_says("hi");
    body["stream"] = true;
    client.send(chat_request(body));
    ASSERT_TRUE(wait_started(1));
  }
  bool wait_started(int64_t count) {
    return script_->wait_for([&] { return script_->started >= count; });
  }

  int64_t max_model_len_ = 200;
  TemporaryFolder folder_;
  RealClock clock_;
  ServeOptions options_;
  std::shared_ptr<FakeScript> script_ = std::make_shared<FakeScript>();
  std::promise<void> ready_;
  std::unique_ptr<Server> server_;
  std::thread thread_;
  absl::Status result_;
};

}  // namespace parvl
