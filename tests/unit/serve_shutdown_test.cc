// Shutting down, and what may not hold it or anybody else up.
#include <absl/cleanup/cleanup.h>
#include <absl/strings/str_cat.h>

#include <atomic>

#include "tests/unit/serve_fixture.h"

namespace parvl {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

TEST_F(ServerTest, ShutdownWhileLoadingDoesNotWaitForTheLoader) {
  auto go = std::make_shared<std::promise<void>>();
  auto done = std::make_shared<std::promise<void>>();
  start_with([wait = go->get_future().share(), done]() -> absl::StatusOr<std::unique_ptr<Engine>> {
    wait.wait();
    done->set_value();
    return invalid("too late");
  });
  EXPECT_EQ(get("/livez").status, 200);
  server_->shutdown();
  join();
  EXPECT_TRUE(result_.ok());
  EXPECT_TRUE(server_->loader_abandoned());
  go->set_value();
  done->get_future().wait();
}

TEST_F(ServerTest, ShutdownLetsTheRunningRequestFinish) {
  start();
  TestClient client(server_->port());
  ASSERT_NO_FATAL_FAILURE(begin_gated_stream(client));
  script_->allow(1);
  EXPECT_THAT(client.read_until("Hel"), HasSubstr("200 OK"));
  server_->shutdown();
  while (get("/readyz").status != 503) {
  }
  EXPECT_EQ(get("/livez").status, 200);
  EXPECT_EQ(get("/health").code(), "draining");
  EXPECT_EQ(chat(user_says("late")).status, 503);
  open_gate();
  EXPECT_THAT(client.read_until("[DONE]"), HasSubstr("\"finish_reason\":\"stop\""));
  join();
  EXPECT_TRUE(result_.ok());
}

TEST_F(ServerTest, ShutdownTimeoutCutsWithAnError) {
  options_.shutdown_timeout = milliseconds(400);
  start();
  close_gate();
  Json body = user_says("hi");
  TestClient whole(server_->port()), stream(server_->port());
  whole.send(chat_request(body));
  ASSERT_TRUE(wait_started(1));
  body["stream"] = true;
  stream.send(chat_request(body));
  ASSERT_TRUE(wait_admitted(2));
  server_->shutdown();
  const TestReply reply = whole.read_reply();
  EXPECT_EQ(reply.status, 503);
  EXPECT_EQ(reply.code(), "draining");
  EXPECT_EQ(stream.read_reply().status, 503);  // not begun, so a status as well
  open_gate();
  join();
  EXPECT_TRUE(result_.ok());
}

// What is cut has time for its last words before the time-out is over, not after it.
TEST_F(ServerTest, CuttingAndItsLastWordsFitTheTimeout) {
  options_.shutdown_timeout = milliseconds(1500);
  start();
  TestClient client(server_->port());
  ASSERT_NO_FATAL_FAILURE(begin_gated_stream(client));
  const double begin_s = clock_.now_seconds();
  server_->shutdown();
  EXPECT_EQ(client.read_reply().status, 503);
  const double cut_s = clock_.now_seconds() - begin_s;
  EXPECT_GE(cut_s, 0.75);  // half of it is for those that run
  EXPECT_LT(cut_s, 1.5);   // the words come before the end
  open_gate();
  join();
}

TEST_F(ServerTest, ShutdownTimeoutEndsABegunStreamWithAnErrorEvent) {
  options_.shutdown_timeout = milliseconds(400);
  start();
  TestClient client(server_->port());
  ASSERT_NO_FATAL_FAILURE(begin_gated_stream(client));
  script_->allow(1);
  EXPECT_THAT(client.read_until("Hel"), HasSubstr("200 OK"));
  server_->shutdown();
  const std::string rest = client.read_until("\r\n0\r\n\r\n");
  EXPECT_THAT(rest, HasSubstr("event: error\ndata: {\"error\""));
  EXPECT_THAT(rest, testing::Not(HasSubstr("[DONE]")));
  open_gate();
  join();
  EXPECT_TRUE(result_.ok());
}

// A schema whose compilation takes seconds, until it is over the limit of steps.
Json asks_for_a_hard_grammar(int number) {
  Json properties = Json::object();
  for (int k = 0; k < 500; ++k) {
    std::string pattern = "x";
    for (int j = 0; j < 8; ++j) pattern += absl::StrCat("|[a-z]{1,", 400 + k + j + number, "}");
    properties[absl::StrCat("k", k)] = {{"type", "string"}, {"pattern", pattern}};
  }
  Json body = user_says("hi");
  body["guided_json"] = {{"type", "object"}, {"properties", properties}};
  return body;
}

TEST_F(ServerTest, AGrammarThatIsHardToCompileKeepsNobodyElseWaiting) {
  start();
  std::vector<std::unique_ptr<TestClient>> clients;
  for (size_t i = 0; i < 4; ++i) {  // more than may run at once
    clients.push_back(std::make_unique<TestClient>(server_->port()));
    clients.back()->send(chat_request(asks_for_a_hard_grammar(static_cast<int>(i))));
    ASSERT_TRUE(wait_admitted(i + 1));
  }
  EXPECT_EQ(chat(user_says("hi")).status, 200);
  ASSERT_TRUE(wait_admitted(4));  // which are at it still
  for (auto& client : clients) client->close();
  ASSERT_TRUE(wait_admitted(0));
  Json body = user_says("hi");
  body["guided_json"] = {{"type", "null"}};
  EXPECT_EQ(chat(body).status, 200);  // the compiler is free again
}

TEST_F(ServerTest, TimeOutsEndTheWaitForAGrammar) {
  options_.request_timeout = milliseconds(100);
  start();
  const TestReply reply = chat(asks_for_a_hard_grammar(0));
  EXPECT_EQ(reply.status, 504);
  EXPECT_EQ(reply.code(), "request_timeout");
}

TEST_F(ServerTest, ShutdownEndsGrammarsThatAreBeingCompiled) {
  options_.shutdown_timeout = milliseconds(400);
  start();
  std::vector<std::unique_ptr<TestClient>> clients;
  for (size_t i = 0; i < 4; ++i) {
    clients.push_back(std::make_unique<TestClient>(server_->port()));
    clients.back()->send(chat_request(asks_for_a_hard_grammar(static_cast<int>(i))));
    ASSERT_TRUE(wait_admitted(i + 1));
  }
  server_->shutdown();
  for (auto& client : clients) {
    const TestReply reply = client->read_reply();
    EXPECT_EQ(reply.status, 503);
    EXPECT_EQ(reply.code(), "draining");
  }
  join();
  const int64_t start_ns = clock_.now_ns();
  server_.reset();  // stops and joins the compiler's thread
  EXPECT_LT(clock_.now_ns() - start_ns, 2'000'000'000);
}

// Decodes nothing before the test lets it.
class GatedImages : public ImageSource {
 public:
  absl::StatusOr<ProcessedImage> prepare(std::string_view, const ImageLimits&, const ImageProcessor&) override {
    ++begun;
    gate_.wait();
    return ProcessedImage();
  }
  void open() { go_.set_value(); }
  std::atomic<int> begun = 0;

 private:
  std::promise<void> go_;
  std::shared_future<void> gate_ = go_.get_future().share();
};

TEST_F(ServerTest, ShutdownEndsWorkThatWaitsForAThread) {
  const auto images = std::make_shared<GatedImages>();
  absl::Cleanup open_gate = [&] { images->open(); };
  options_.media.images = images;
  options_.shutdown_timeout = milliseconds(1000);
  start();
  const Json image = {{"type", "image_url"}, {"image_url", {{"url", "data:,x"}}}};
  const Json body = {{"messages", Json::array({{{"role", "user"}, {"content", Json::array({image, image, image})}}})}};
  constexpr int kThreads = 16, kRequests = 40;  // of /tokenize, which does its work before anybody's turn
  std::vector<std::unique_ptr<TestClient>> clients;
  for (int i = 0; i < kRequests; ++i) {
    clients.push_back(std::make_unique<TestClient>(server_->port()));
    clients.back()->send(http_request("POST", "/tokenize", body.dump()));
  }
  clients.push_back(std::make_unique<TestClient>(server_->port()));
  clients.back()->send(chat_request(body));
  ASSERT_TRUE(wait_admitted(1));
  const int64_t end = clock_.now_ns() + 20'000'000'000;
  while (images->begun < kThreads + 1 && clock_.now_ns() < end) std::this_thread::yield();
  ASSERT_EQ(images->begun, kThreads + 1);
  server_->shutdown();
  for (auto& client : clients) {
    const TestReply reply = client->read_reply();
    EXPECT_EQ(reply.status, 503);
    EXPECT_EQ(reply.code(), "draining");
  }
  join();
  std::move(open_gate).Invoke();
  server_.reset();
  EXPECT_EQ(images->begun, kThreads + 1);  // neither a further image nor a request that waited
}

}  // namespace
}  // namespace parvl
