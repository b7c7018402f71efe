// What is answered: chat completions, streams, models, errors.
#include "tests/unit/serve_fixture.h"

namespace parvl {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST_F(ServerTest, AnswersWithOneObject) {
  start();
  const TestReply reply = chat(user_says("hi"), "X-Request-Id: abc-1\r\n");
  ASSERT_EQ(reply.status, 200) << reply.body;
  const Json json = reply.json();
  EXPECT_EQ(json["object"], "chat.completion");
  EXPECT_TRUE(json["id"].get<std::string>().starts_with("chatcmpl-"));
  EXPECT_EQ(json["model"], "tiny");
  EXPECT_EQ(json["choices"].size(), 1u);
  EXPECT_EQ(json["choices"][0]["message"]["role"], "assistant");
  EXPECT_EQ(json["choices"][0]["message"]["content"], "Hello!");
  EXPECT_EQ(json["choices"][0]["finish_reason"], "stop");
  EXPECT_TRUE(json["choices"][0]["logprobs"].is_null());
  EXPECT_EQ(json["usage"]["completion_tokens"], 4);
  const int64_t prompt = json["usage"]["prompt_tokens"];
  EXPECT_EQ(prompt, static_cast<int64_t>(script_->prompts[0].ids.size()));
  EXPECT_EQ(json["usage"]["total_tokens"], prompt + 4);
  EXPECT_EQ(reply.headers.at("x-request-id"), "abc-1");
  EXPECT_EQ(reply.headers.at("content-type"), "application/json");
}

TEST_F(ServerTest, RequestIdIsMadeWhenNoneOrAnUnusableOneIsSent) {
  start();
  EXPECT_TRUE(get("/livez").headers.at("x-request-id").starts_with("req-"));
  EXPECT_TRUE(
      get("/livez", "X-Request-Id: " + std::string(200, 'x') + "\r\n").headers.at("x-request-id").starts_with("req-"));
  EXPECT_NE(get("/livez").headers.at("x-request-id"), get("/livez").headers.at("x-request-id"));
}

TEST_F(ServerTest, StreamsRoleContentFinishDone) {
  start();
  Json body = user_says("hi");
  body["stream"] = true;
  const TestReply reply = chat(body);
  ASSERT_EQ(reply.status, 200);
  EXPECT_TRUE(reply.whole);
  EXPECT_THAT(reply.headers.at("content-type"), HasSubstr("text/event-stream"));
  const auto events = reply.events();
  ASSERT_EQ(events.size(), 6u) << reply.body;
  std::string text;
  for (size_t i = 0; i < 5; ++i) {
    const Json chunk = Json::parse(events[i]);
    EXPECT_EQ(chunk["object"], "chat.completion.chunk");
    EXPECT_EQ(chunk["id"], Json::parse(events[0])["id"]);
    EXPECT_FALSE(chunk.contains("usage"));
    const Json& choice = chunk["choices"][0];
    if (i == 0) {
      EXPECT_EQ(choice["delta"]["role"], "assistant");
      EXPECT_EQ(choice["delta"]["content"], "");
    } else if (i == 4) {
      EXPECT_EQ(choice["delta"], Json::object());
      EXPECT_EQ(choice["finish_reason"], "stop");
    } else {
      text += choice["delta"]["content"].get<std::string>();
      EXPECT_TRUE(choice["finish_reason"].is_null());
    }
  }
  EXPECT_EQ(text, "Hello!");
  EXPECT_EQ(events[5], "[DONE]");
}

TEST_F(ServerTest, UsageChunkOnRequestOnly) {
  start();
  Json body = user_says("hi");
  body["stream"] = true;
  body["stream_options"] = {{"include_usage", true}};
  body["max_tokens"] = 2;
  const auto events = chat(body).events();
  ASSERT_GE(events.size(), 3u);
  EXPECT_EQ(events.back(), "[DONE]");
  const Json usage = Json::parse(events[events.size() - 2]);
  EXPECT_EQ(usage["choices"], Json::array());
  EXPECT_EQ(usage["usage"]["completion_tokens"], 2);
  EXPECT_TRUE(Json::parse(events[0])["usage"].is_null());
  EXPECT_EQ(Json::parse(events[events.size() - 3])["choices"][0]["finish_reason"], "length");
}

TEST_F(ServerTest, LogprobsComeWithEveryToken) {
  start();
  Json body = user_says("hi");
  body["logprobs"] = true;
  body["top_logprobs"] = 2;
  const Json content = chat(body).json()["choices"][0]["logprobs"]["content"];
  ASSERT_EQ(content.size(), 4u);
  EXPECT_EQ(content[0]["token"], "H");
  EXPECT_EQ(content[0]["bytes"], Json::array({72}));
  EXPECT_EQ(content[0]["logprob"], -0.5);
  EXPECT_EQ(content[0]["top_logprobs"].size(), 2u);
  EXPECT_EQ(content[0]["top_logprobs"][0]["token"], "\xef\xbf\xbd");  // byte 200 alone is no character
  EXPECT_EQ(content[0]["top_logprobs"][0]["bytes"], Json::array({200}));

  body["stream"] = true;
  size_t entries = 0;
  for (const std::string& event : chat(body).events()) {
    if (event == "[DONE]") continue;
    const Json choice = Json::parse(event)["choices"][0];
    if (!choice["logprobs"].is_null()) entries += choice["logprobs"]["content"].size();
    if (choice["finish_reason"] == "stop") {
      EXPECT_EQ(choice["delta"], Json::object());
    }
  }
  EXPECT_EQ(entries, 4u);
}

TEST_F(ServerTest, NothingIsSentBeforeTheFirstToken) {
  start();
  TestClient client(server_->port());
  ASSERT_NO_FATAL_FAILURE(begin_gated_stream(client));
  {
    std::lock_guard lock(script_->mutex);
    script_->fail_after = 1;  // the first token, then a failure
    script_->error = failed("device lost");
  }
  // A probe on another connection goes through the same thread: what was to be sent before it has been sent.
  EXPECT_EQ(get("/livez").status, 200);
  open_gate();
  const TestReply reply = client.read_reply();
  EXPECT_EQ(reply.status, 200);
  EXPECT_TRUE(reply.whole);
  const auto events = reply.events();
  ASSERT_FALSE(events.empty());
  EXPECT_TRUE(events.back().starts_with("error:")) << reply.body;
  EXPECT_EQ(Json::parse(events.back().substr(6))["error"]["type"], "server_error");
  EXPECT_THAT(reply.body, testing::Not(HasSubstr("[DONE]")));
}

TEST_F(ServerTest, FailureBeforeTheFirstTokenIsAStatusAlsoForAStream) {
  start();
  script_->fail_after = 0;
  script_->error = failed("device lost");
  Json body = user_says("hi");
  EXPECT_EQ(chat(body).status, 500);
  body["stream"] = true;
  EXPECT_EQ(chat(body).status, 500);
  script_->error = invalid("no room");
  EXPECT_EQ(chat(body).status, 400);
  script_->fail_after = -1;
  EXPECT_EQ(chat(body).status, 200);  // the server goes on
}

TEST_F(ServerTest, WithNothingLeftToRunOnTheCodeIsTheSameInAStream) {
  start();
  script_->error = absl::UnavailableError("its instances were lost too often");
  for (const int64_t tokens : {0, 1}) {
    script_->fail_after = tokens;
    Json body = user_says("hi");
    const TestReply whole = chat(body);
    EXPECT_EQ(whole.status, 503);
    EXPECT_EQ(whole.code(), "no_healthy_instance");
    body["stream"] = true;
    const TestReply stream = chat(body);
    if (tokens == 0) {
      EXPECT_EQ(stream.body, whole.body);
      continue;
    }
    ASSERT_EQ(stream.status, 200);
    const std::string last = stream.events().back();
    ASSERT_TRUE(last.starts_with("error:")) << stream.body;
    EXPECT_EQ(last.substr(6), whole.body);
  }
}

TEST_F(ServerTest, DefaultsAndFieldsReachTheGenerator) {
  start();
  EXPECT_EQ(chat(user_says("hi")).status, 200);
  Json body = user_says("hi");
  body.update({{"temperature", 0},
               {"top_k", 5},
               {"seed", -3},
               {"stop", "x"},
               {"max_completion_tokens", 3},
               {"max_tokens", 9},
               {"logit_bias", {{"7", -1.5}}},
               {"min_p", nullptr},
               {"made_up", 1},
               {"model", "alias"}});
  const TestReply reply = chat(body);
  EXPECT_EQ(reply.status, 200);
  EXPECT_EQ(reply.json()["model"], "alias");
  const SamplingParams first = script_->samplings[0], second = script_->samplings[1];
  EXPECT_EQ(first.temperature, 0.5);  // the model's default
  EXPECT_EQ(first.max_tokens, -1);
  EXPECT_EQ(second.temperature, 0);
  EXPECT_EQ(second.top_k, 5);
  EXPECT_EQ(second.seed, static_cast<uint64_t>(-3));
  EXPECT_THAT(second.stop, ElementsAre("x"));
  EXPECT_EQ(second.max_tokens, 3);
  EXPECT_EQ(second.logit_bias.at(7), -1.5);
  EXPECT_EQ(chat(user_says("hi")).status, 200);
  EXPECT_NE(script_->samplings[2].seed, first.seed);  // no seed asked for: a new one each time
}

TEST_F(ServerTest, ModelsVersionAndProbes) {
  start();
  const Json list = get("/v1/models").json();
  ASSERT_EQ(list["data"].size(), 2u);
  EXPECT_EQ(list["data"][0]["id"], "tiny");
  EXPECT_EQ(list["data"][0]["max_model_len"], 200);
  EXPECT_EQ(list["data"][0]["parvl"]["modules"]["vision_encoder"], "test");
  EXPECT_EQ(get("/v1/models/alias").json()["id"], "alias");
  EXPECT_EQ(get("/v1/models/%61li%61s").json()["id"], "alias");
  EXPECT_EQ(get("/v1/models/other").status, 404);
  EXPECT_EQ(get("/version").json()["version"], "9.9");
  for (const char* path : {"/livez", "/readyz", "/health", "/health?verbose=1"})
    EXPECT_EQ(get(path).status, 200) << path;
}

TEST_F(ServerTest, WrongRoutesAndMethods) {
  start();
  EXPECT_EQ(get("/nothing").status, 404);
  EXPECT_EQ(get("/nothing").code(), "route_not_found");
  EXPECT_EQ(get("/v1/chat/completions").status, 405);
  EXPECT_EQ(get("/v1/chat/completions").headers.at("allow"), "POST, OPTIONS");
  for (const char* path : {"/v1/completions", "/tokenize", "/detokenize"}) EXPECT_EQ(get(path).status, 405) << path;
  TestClient client(server_->port());
  client.send(http_request("HEAD", "/health", ""));
  const TestReply head = client.read_reply(true);
  EXPECT_EQ(head.status, 200);
  EXPECT_EQ(client.get("/livez").status, 200);  // no body was sent that would be taken for this answer
}

TEST_F(ServerTest, MethodsAreToldAndUnknownOnesAre501) {
  start();
  const std::vector<std::pair<std::string, std::string>> routes = {{"/v1/chat/completions", "POST, OPTIONS"},
                                                                   {"/v1/models", "GET, HEAD, OPTIONS"},
                                                                   {"/livez", "GET, HEAD, OPTIONS"},
                                                                   {"*", "GET, HEAD, POST, OPTIONS"}};
  TestClient client(server_->port());
  for (const auto& [path, methods] : routes) {
    client.send(http_request("OPTIONS", path, ""));
    const TestReply reply = client.read_reply(true);  // 204 has no body
    EXPECT_EQ(reply.status, 204) << path;
    EXPECT_EQ(reply.headers.at("allow"), methods) << path;
    EXPECT_FALSE(reply.headers.contains("content-length")) << path;
    if (path == "*") continue;
    client.send(http_request("DELETE", path, ""));
    const TestReply wrong = client.read_reply();
    EXPECT_EQ(wrong.status, 405) << path;
    EXPECT_EQ(wrong.headers.at("allow"), methods) << path;
    client.send(http_request("FROB", path, ""));
    EXPECT_EQ(client.read_reply().status, 501) << path;
  }
  client.send(http_request("OPTIONS", "/nothing", ""));
  EXPECT_EQ(client.read_reply().status, 404);
  client.send(http_request("GET", "*", ""));
  EXPECT_EQ(client.read_reply().status, 404);
}

TEST_F(ServerTest, ATargetWithSchemeAndHostIsItsPath) {
  start();
  for (const char* target : {"http://test/v1/models", "HTTP://test:80/v1/models?a=b", "/v1/models?next=http://test/"}) {
    EXPECT_EQ(get(target).json()["object"], "list") << target;
  }
  EXPECT_EQ(get("http://test").code(), "route_not_found");
  EXPECT_THAT(get("http://test?x").message(), HasSubstr("no route '/'"));
  TestClient client(server_->port());
  client.send(http_request("POST", "http://test/v1/chat/completions", user_says("hi").dump()));
  EXPECT_EQ(client.read_reply().status, 200);
}

TEST_F(ServerTest, OneHostHeaderIsNeededSinceHttp11) {
  start();
  for (const char* headers : {"", "Host: a\r\nHost: b\r\n"}) {
    TestClient client(server_->port());
    client.send(std::string("GET /livez HTTP/1.1\r\n") + headers + "\r\n");
    const TestReply reply = client.read_reply();
    EXPECT_EQ(reply.status, 400) << headers;
    EXPECT_THAT(reply.message(), HasSubstr("one Host header"));
  }
  TestClient old(server_->port());
  old.send("GET /livez HTTP/1.0\r\n\r\n");
  EXPECT_EQ(old.read_reply().status, 200);
}

TEST_F(ServerTest, BadBodiesNameTheField) {
  start();
  TestClient client(server_->port());
  TestReply reply = client.post("/v1/chat/completions", "{\"messages\": [");
  EXPECT_EQ(reply.status, 400);
  EXPECT_EQ(reply.json()["error"]["type"], "invalid_request_error");
  EXPECT_THAT(reply.message(), HasSubstr("not valid JSON"));
  for (const char* empty : {"", " \r\n"}) {
    reply = client.post("/v1/chat/completions", empty);
    EXPECT_EQ(reply.status, 400);
    EXPECT_EQ(reply.message(), "the body is empty; send a JSON object with `messages`");
  }
  Json body = user_says("hi");
  body["temperature"] = "hot";
  reply = client.chat(body);
  EXPECT_EQ(reply.status, 400);
  EXPECT_EQ(reply.param(), "temperature");
  body = user_says("hi");
  body["model"] = "other";
  reply = client.chat(body);
  EXPECT_EQ(reply.status, 404);
  EXPECT_EQ(reply.code(), "model_not_found");
  body = user_says(std::string(300, 'x'));
  reply = client.chat(body);
  EXPECT_EQ(reply.status, 400);
  EXPECT_EQ(reply.code(), "context_length_exceeded");
  EXPECT_THAT(reply.message(), HasSubstr("200"));
  body = user_says(std::string(190, 'x'));  // fits alone, not with the template around it
  EXPECT_EQ(client.chat(body).code(), "context_length_exceeded");
}

TEST_F(ServerTest, KeyGuardsEveryRouteButTheProbes) {
  options_.api_keys = {"first", "second"};
  start();
  for (const char* path : {"/livez", "/readyz", "/health"}) EXPECT_EQ(get(path).status, 200);
  for (const char* path : {"/v1/models", "/version", "/metrics", "/nothing"}) EXPECT_EQ(get(path).status, 401) << path;
  EXPECT_EQ(chat(user_says("hi")).status, 401);
  EXPECT_EQ(chat(user_says("hi"), "Authorization: Bearer firs\r\n").code(), "invalid_api_key");
  EXPECT_EQ(chat(user_says("hi"), "Authorization: Basic first\r\n").status, 401);
  EXPECT_EQ(chat(user_says("hi"), "Authorization: Bearer \r\n").status, 401);
  EXPECT_EQ(chat(user_says("hi"), "Authorization: Bearer first\r\n").status, 200);
  EXPECT_EQ(chat(user_says("hi"), "authorization: bearer second\r\n").status, 200);
}

TEST_F(ServerTest, ConnectionIsKeptAndTakesPipelinedRequests) {
  start();
  TestClient client(server_->port());
  EXPECT_EQ(client.chat(user_says("a")).status, 200);
  EXPECT_EQ(client.get("/nothing").status, 404);
  EXPECT_EQ(client.chat(user_says("b")).status, 200);
  client.send(chat_request(user_says("c")) + http_request("GET", "/version", "") + chat_request(user_says("d")));
  EXPECT_EQ(client.read_reply().json()["object"], "chat.completion");
  EXPECT_EQ(client.read_reply().json()["version"], "9.9");
  EXPECT_EQ(client.read_reply().json()["object"], "chat.completion");
}

TEST_F(ServerTest, Http10StreamEndsWithTheConnection) {
  start();
  Json body = user_says("hi");
  body["stream"] = true;
  const std::string text = body.dump();
  TestClient client(server_->port());
  client.send("POST /v1/chat/completions HTTP/1.0\r\nContent-Length: " + std::to_string(text.size()) + "\r\n\r\n" +
              text);
  const TestReply reply = client.read_reply();
  EXPECT_EQ(reply.status, 200);
  EXPECT_FALSE(reply.headers.contains("transfer-encoding"));
  EXPECT_EQ(reply.events().back(), "[DONE]");
}

}  // namespace
}  // namespace parvl
