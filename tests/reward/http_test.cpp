#include "reward/http.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <mutex>
#include <thread>

#include "testing.h"

namespace plumb {
namespace {

using nlohmann::json;
using testing::error_of;
using ::testing::HasSubstr;
using testing::sample_of;

// An HTTP server that shares no code with the client: one connection after the other, each answered with the next of
// `answers` as it stands ("" = the connection is closed without an answer, "slow" = nothing is sent until the client
// goes). Connections beyond them are answered with the last.
class Server {
 public:
  explicit Server(std::vector<std::string> answers) : answers_(std::move(answers)) {
    listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);  // and any free port
    socklen_t size = sizeof address;
    EXPECT_EQ(::bind(listener_, reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(::listen(listener_, 16), 0);
    ::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size);
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this] { serve(); });
  }
  ~Server() {
    ::shutdown(listener_, SHUT_RDWR);  // accept() returns
    thread_.join();
    ::close(listener_);
  }
  std::string url(const std::string& target = "/score") const {
    return "http://127.0.0.1:" + std::to_string(port_) + target;
  }
  std::vector<std::string> requests() {
    const std::lock_guard lock(mutex_);
    return requests_;
  }

 private:
  void serve() {
    for (size_t k = 0;; ++k) {
      const int client = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      if (client < 0) return;
      const std::string request = read_request(client), answer = answers_[std::min(k, answers_.size() - 1)];
      {
        const std::lock_guard lock(mutex_);
        requests_.push_back(request);
      }
      char byte;
      if (answer == "slow") {
        while (::recv(client, &byte, 1, 0) > 0) {
        }
      } else {
        ::send(client, answer.data(), answer.size(), MSG_NOSIGNAL);
      }
      ::close(client);
    }
  }

  static std::string read_request(int client) {
    std::string text;
    char bytes[4096];
    for (;;) {
      const size_t head = text.find("\r\n\r\n"), length = text.find("Content-Length: ");
      if (head != std::string::npos && length != std::string::npos &&
          text.size() >= head + 4 + std::stoul(text.substr(length + 16)))
        return text;
      const ssize_t got = ::recv(client, bytes, sizeof bytes, 0);
      if (got <= 0) return text;
      text.append(bytes, static_cast<size_t>(got));
    }
  }

  std::vector<std::string> answers_, requests_;
  std::mutex mutex_;
  int listener_ = -1;
  int port_ = 0;
  std::thread thread_;
};

std::string answer(int status, const std::string& body) {
  return "HTTP/1.1 " + std::to_string(status) + " X\r\nContent-Length: " + std::to_string(body.size()) + "\r\n\r\n" +
         body;
}

// Retries at once; the time limit is for what must not be late on a busy machine, tests of late answers have their own.
HttpKeys keys_for(const Server& server) { return {.url = server.url(), .time_limit = 20, .retry_delay = 0.001}; }

std::string reason(const HttpKeys& keys) {
  const auto reward = make_http_reward(keys, "run.toml:1");
  return error_of([&] { reward->score(sample_of("x")); });
}

TEST(HttpReward, PostsTheSample) {
  Server server({answer(200, R"({"reward": 0.5, "metrics": {"m": 2}})")});
  HttpKeys keys = keys_for(server);
  keys.url = server.url("/a/b?c=d");
  keys.headers["Authorization"] = "Bearer 1";
  RewardSample sample = sample_of("\xC3\xA4\"\xFF", {{"field", 3}});
  sample.answer.calls = {{"c1", "f", "{}"}};
  sample.answer.tokens = 5;
  sample.group = 7;
  sample.number = 2;
  const Score score = make_http_reward(keys, "run.toml:1")->score(sample);
  EXPECT_EQ(score.reward, 0.5);
  EXPECT_EQ(score.metrics.at("m"), 2);
  const std::string request = server.requests().at(0);
  EXPECT_THAT(request, ::testing::StartsWith("POST /a/b?c=d HTTP/1.1\r\n"));
  EXPECT_THAT(request, HasSubstr("Host: 127.0.0.1:"));
  EXPECT_THAT(request, HasSubstr("Content-Type: application/json\r\n"));
  EXPECT_THAT(request, HasSubstr("Authorization: Bearer 1\r\n"));
  EXPECT_EQ(json::parse(request.substr(request.find("\r\n\r\n") + 4)), json::parse(R"({
    "line": {"field": 3}, "messages": [{"role": "user", "content": "question"}], "group": 7, "sample": 2,
    "answer": {"content": "\u00e4\"\ufffd", "text": "\u00e4\"\ufffd<eos>", "reasoning": "", "tokens": 5,
               "finish_reason": "stop", "tool_calls": [{"id": "c1", "name": "f", "arguments": "{}"}]}})"));
}

TEST(HttpReward, TriesAgainAfterServerErrorsAndLostConnections) {
  Server server(
      {answer(500, "busy"), "", "HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", answer(200, R"({"reward": 1})")});
  HttpKeys keys = keys_for(server);
  keys.retries = 3;
  EXPECT_EQ(reason(keys), "");
  EXPECT_EQ(server.requests().size(), 4u);
  EXPECT_EQ(server.requests()[0], server.requests()[3]);
}

TEST(HttpReward, GivesUpAfterItsRetries) {
  Server server({answer(503, "busy\nnow")});
  EXPECT_EQ(reason(keys_for(server)), server.url() + ": 3 attempts, the last: status 503: busy now");
  EXPECT_EQ(server.requests().size(), 3u);
  HttpKeys nobody{.url = "http://127.0.0.1:1/", .retries = 1, .retry_delay = 0.001};
  EXPECT_THAT(reason(nobody), HasSubstr("http://127.0.0.1:1/: 2 attempts, the last: Connection refused"));
}

TEST(HttpReward, WhatTheServerMeansIsNotAskedAgain) {
  const std::vector<std::pair<std::string, std::string>> rows = {
      {answer(404, "no such page"), ": status 404: no such page"},
      {answer(302, ""), ": status 302: "},
      {answer(200, "<html>"), ": answered with no JSON: <html>"},
      {answer(200, "[1]"), ": answered with no JSON object: [1]"},
      {answer(200, "{}"), ": answered without a reward: {}"},
      {answer(200, R"({"reward": null})"), ": answered with a reward that is no number: {\"reward\":null}"},
      {answer(200, R"({"error": "bad"})"), ": reports: bad"},
      {answer(200, std::string(5000, 'x')), ": answered with more than 1000 bytes"},
  };
  for (const auto& [sent, wanted] : rows) {
    Server server({sent});
    HttpKeys keys = keys_for(server);
    keys.max_body = 1000;
    EXPECT_EQ(reason(keys), server.url() + wanted);
    EXPECT_EQ(server.requests().size(), 1u);
  }
}

TEST(HttpReward, ASlowServerCostsTheTimeLimitOnce) {
  Server server({"slow"});
  HttpKeys keys = keys_for(server);
  keys.time_limit = 0.1;
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(reason(keys), server.url() + ": no answer within 0.1 s");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
}

TEST(HttpReward, Urls) {
  for (const char* url : {"ftp://x/", "http://", "http:///a", "http://x:y/", "http://x:/", "http://user@x/"})
    EXPECT_THAT(error_of([&] { make_http_reward({.url = url}, "run.toml:9"); }),
                HasSubstr(std::string("run.toml:9: url ") + url + " is not http://host[:port]/path"));
  for (const char* url : {"http://x", "http://x:1", "http://[::1]:80/a", "http://[::1]", "http://x?a=b:c"})
    EXPECT_EQ(error_of([&] { make_http_reward({.url = url}, "run.toml:9"); }), "");
}

}  // namespace
}  // namespace plumb
