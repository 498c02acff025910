// The transport alone: framing, limits, and what becomes of an answer when its client goes.
#include "serve/http.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <mutex>
#include <thread>

#include "serve/client.h"

namespace plumb::serve {
namespace {

using plumb::testing::Client;
using plumb::testing::Reply;
using std::chrono::milliseconds;

// A server in a thread of its own.
class Running {
 public:
  explicit Running(Handler handler, HttpOptions options = {})
      : server_(options, std::move(handler)), thread_([this] { server_.run(); }) {}
  ~Running() {
    server_.stop();
    server_.stop();
    thread_.join();
  }
  int port() const { return server_.port(); }
  HttpServer& server() { return server_; }

 private:
  HttpServer server_;
  std::thread thread_;
};

// "METHOD path?query body"
HttpReply echo(HttpRequest r, const Wake&) {
  return {200, "text/plain", r.method + " " + r.path + "?" + r.query + " " + r.body};
}

// An answer whose test decides what it says; tells when it is destroyed.
struct Script {
  std::mutex mutex;
  std::optional<HttpReply> reply;
  std::string pieces;
  bool done = false;
  Wake wake;
  std::promise<void> begun, gone;

  void say(const std::string& text, bool last = false) {
    const std::lock_guard lock(mutex);
    if (!reply) reply = HttpReply{200, "text/plain", "", {}, true};
    pieces += text;
    done = last;
    wake();
  }
};
class ScriptedAnswer : public Answer {
 public:
  ScriptedAnswer(Script& script, Wake wake) : script_(script) {
    const std::lock_guard lock(script.mutex);
    script_.wake = std::move(wake);
    script_.begun.set_value();
  }
  ~ScriptedAnswer() override { script_.gone.set_value(); }
  std::optional<HttpReply> reply() override {
    const std::lock_guard lock(script_.mutex);
    return script_.reply;
  }
  bool more(std::string& out) override {
    const std::lock_guard lock(script_.mutex);
    out += std::exchange(script_.pieces, "");
    return script_.done;
  }
  void quiet(std::string& out) override { out += "~"; }

 private:
  Script& script_;
};
Handler scripted(Script& script) {
  return [&script](const HttpRequest&, Wake wake) { return std::make_unique<ScriptedAnswer>(script, std::move(wake)); };
}
// Whether it happens within the patience of a test.
bool happens(std::promise<void>& p) {
  return p.get_future().wait_for(std::chrono::seconds(20)) == std::future_status::ready;
}

// ---- Framing -------------------------------------------------------------------------------------------------------

TEST(Http, ConnectionTakesManyRequests) {
  Running s(echo);
  Client c(s.port());
  for (int i = 0; i < 3; ++i) {
    c.request("POST", "/p" + std::to_string(i) + "?a=b", "body" + std::to_string(i));
    EXPECT_EQ(c.read_reply().body, "POST /p" + std::to_string(i) + "?a=b body" + std::to_string(i));
  }
}

TEST(Http, PipelinedRequestsAreAnsweredInOrder) {
  Running s(echo);
  Client c(s.port());
  c.send(
      "GET /1 HTTP/1.1\r\n\r\nPOST /2 HTTP/1.1\r\nContent-Length: 3\r\n\r\nabcGET /3 HTTP/1.1\r\nConnection: "
      "close\r\n\r\n");
  EXPECT_EQ(c.read_reply().body, "GET /1? ");
  EXPECT_EQ(c.read_reply().body, "POST /2? abc");
  EXPECT_EQ(c.read_reply().body, "GET /3? ");
  EXPECT_EQ(c.read_to_end(), "");
}

TEST(Http, RequestMayComeByteByByte) {
  Running s(echo);
  Client c(s.port());
  for (char byte : std::string("POST /x HTTP/1.1\r\nContent-Length: 2\r\n\r\nhi")) ASSERT_TRUE(c.send({byte}));
  EXPECT_EQ(c.read_reply().body, "POST /x? hi");
}

TEST(Http, ChunkedBody) {
  Running s(echo);
  Client c(s.port());
  c.send(
      "POST /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n8;ext=1\r\ndefghijk\r\n0\r\nTrailer: "
      "1\r\n\r\n");
  EXPECT_EQ(c.read_reply().body, "POST /x? abcdefghijk");
  c.request("GET", "/next");
  EXPECT_EQ(c.read_reply().body, "GET /next? ");
}

TEST(Http, ExpectContinueIsAnsweredBeforeTheBody) {
  Running s(echo);
  Client c(s.port());
  c.send("POST /x HTTP/1.1\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n");
  EXPECT_EQ(c.read_until("\r\n\r\n"), "HTTP/1.1 100 Continue\r\n\r\n");
  c.send("hi");
  EXPECT_EQ(c.read_reply().body, "POST /x? hi");
}

TEST(Http, HeadHasTheLengthAndNoBody) {
  Running s(echo);
  Client c(s.port());
  c.request("HEAD", "/x");
  const Reply r = c.read_reply(true);
  EXPECT_EQ(r.headers.at("content-length"), std::to_string(std::string("HEAD /x? ").size()));
  c.request("GET", "/y");
  EXPECT_EQ(c.read_reply().body, "GET /y? ");
}

TEST(Http, OldClientsReadToTheEndOfTheConnection) {
  Script script;
  Running s(scripted(script));
  Client c(s.port());
  c.send("GET /x HTTP/1.0\r\n\r\n");
  ASSERT_TRUE(happens(script.begun));
  script.say("one, ");
  script.say("two", true);
  const Reply head = c.read_head();
  EXPECT_EQ(head.headers.count("transfer-encoding"), 0u);
  EXPECT_EQ(c.read_to_end(), "one, two");
}

TEST(Http, HostOfTheTargetIsNoPartOfThePath) {
  Running s(echo);
  Client c(s.port());
  c.send("GET http://other/x?y HTTP/1.1\r\nHost: other\r\n\r\n");
  EXPECT_EQ(c.read_reply().body, "GET /x?y ");
}

// ---- Limits --------------------------------------------------------------------------------------------------------

TEST(Http, BodyOverTheLimitIs413EvenWhileItIsSent) {
  HttpOptions o;
  o.max_body = 1000;
  Running s(echo, o);
  {
    Client c(s.port());
    c.send("POST /x HTTP/1.1\r\nContent-Length: 1001\r\nExpect: 100-continue\r\n\r\n");
    EXPECT_EQ(c.read_reply().status, 413);
  }
  {
    Client c(s.port());
    c.send("POST /x HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n" + std::string(1'000'000, 'x'));
    const Reply r = c.read_reply();
    EXPECT_EQ(r.status, 413);
    EXPECT_NE(r.body.find("1000 bytes"), std::string::npos) << r.body;
  }
  {
    Client c(s.port());
    c.send("POST /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n7d0\r\n" + std::string(2000, 'x'));
    EXPECT_EQ(c.read_reply().status, 413);
  }
}

TEST(Http, HeaderOverTheLimitIs431) {
  Running s(echo);
  Client c(s.port());
  c.send("GET /x HTTP/1.1\r\nA: " + std::string(20'000, 'x') + "\r\n\r\n");
  EXPECT_EQ(c.read_reply().status, 431);
}

TEST(Http, MalformedRequestsAre400AndCloseTheConnection) {
  Running s(echo);
  for (const char* bad : {"\r\nGARBAGE\r\n\r\n", "GET /x\r\n\r\n", "GET  HTTP/1.1\r\n\r\n", "GET /x HTTP/9.9\r\n\r\n",
                          "GET /x HTTP/1.1\r\nno colon\r\n\r\n", "POST /x HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
                          "POST /x HTTP/1.1\r\nContent-Length: 2x\r\n\r\nab",
                          "POST /x HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
                          "POST /x HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
                          "POST /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nab\r\n"}) {
    Client c(s.port());
    c.send(bad);
    EXPECT_EQ(c.read_reply().status, 400) << bad;
    EXPECT_EQ(c.read_to_end(), "") << bad;
  }
}

TEST(Http, ConnectionsOverTheLimitAre503) {
  HttpOptions o;
  o.max_connections = 2;
  Running s(echo, o);
  Client a(s.port()), b(s.port());
  for (Client* c : {&a, &b}) {
    c->request("GET", "/x");
    EXPECT_EQ(c->read_reply().status, 200);
  }
  Client third(s.port());
  const Reply r = third.read_reply();
  EXPECT_EQ(r.status, 503);
  EXPECT_EQ(r.headers.count("retry-after"), 1u);
}

TEST(Http, SilentAndSlowConnectionsAreClosed) {
  HttpOptions o;
  o.idle_timeout = o.read_timeout = milliseconds(20);
  Running s(echo, o);
  Client silent(s.port()), slow(s.port());
  slow.send("GET /x HT");
  EXPECT_EQ(silent.read_to_end(), "");
  EXPECT_EQ(slow.read_to_end(), "");
}

// ---- Answers in the making -----------------------------------------------------------------------------------------

TEST(Http, PiecesArriveWhileTheAnswerIsMade) {
  Script script;
  Running s(scripted(script));
  Client c(s.port());
  c.request("GET", "/x");
  ASSERT_TRUE(happens(script.begun));
  script.say("one");
  EXPECT_EQ(c.read_head().headers.at("transfer-encoding"), "chunked");
  EXPECT_EQ(c.read_chunk(), "one");
  script.say("two");
  EXPECT_EQ(c.read_chunk(), "two");
  script.say("", true);
  EXPECT_EQ(c.read_chunk(), "");
  EXPECT_TRUE(happens(script.gone));
}

TEST(Http, QuietStreamsSayThatTheyLive) {
  Script script;
  HttpOptions o;
  o.quiet = milliseconds(5);
  Running s(scripted(script), o);
  Client c(s.port());
  c.request("GET", "/x");
  ASSERT_TRUE(happens(script.begun));
  script.say("one");
  c.read_head();
  EXPECT_EQ(c.read_chunk(), "one");
  EXPECT_EQ(c.read_chunk(), "~");
  EXPECT_EQ(c.read_chunk(), "~");
}

TEST(Http, AnswerEndsWithItsClient) {
  for (const bool streaming : {false, true}) {
    Script script;
    Running s(scripted(script));
    Client c(s.port());
    c.request("GET", "/x");
    ASSERT_TRUE(happens(script.begun));
    if (streaming) {
      script.say("one");
      c.read_head();
      c.read_chunk();
    }
    c.close();
    EXPECT_TRUE(happens(script.gone)) << streaming;
  }
}

TEST(Http, RequestSentDuringAnAnswerIsTheNextOne) {
  Script script;
  Running s([&](const HttpRequest& r, Wake wake) -> std::variant<HttpReply, std::unique_ptr<Answer>> {
    if (r.path == "/next") return HttpReply{200, "text/plain", "next"};
    return std::make_unique<ScriptedAnswer>(script, std::move(wake));
  });
  Client c(s.port());
  c.request("GET", "/x");
  ASSERT_TRUE(happens(script.begun));
  c.request("GET", "/next");
  script.say("one", true);
  EXPECT_EQ(c.read_reply().body, "one");
  EXPECT_EQ(c.read_reply().body, "next");
}

TEST(Http, ClientThatDoesNotReadIsCutOff) {
  Script script;
  HttpOptions o;
  o.write_timeout = milliseconds(50);
  Running s(scripted(script), o);
  Client c(s.port());
  c.request("GET", "/x");
  ASSERT_TRUE(happens(script.begun));
  script.say(std::string(size_t{64} << 20, 'x'));  // more than any socket buffers
  EXPECT_TRUE(happens(script.gone));
}

TEST(Http, WhatAHandlerThrowsIs500) {
  Running s([](const HttpRequest&, const Wake&) -> HttpReply { throw std::runtime_error("broken handler"); });
  Client c(s.port());
  for (int i = 0; i < 2; ++i) {
    c.request("GET", "/x");
    const Reply r = c.read_reply();
    EXPECT_EQ(r.status, 500);
    EXPECT_EQ(r.body, "broken handler\n");
  }
}

// ---- The end -------------------------------------------------------------------------------------------------------

TEST(Http, StopLetsAnswersFinish) {
  Script script;
  HttpServer server({}, scripted(script));
  std::thread thread([&] { server.run(); });
  Client c(server.port()), idle(server.port());
  c.request("GET", "/x");
  ASSERT_TRUE(happens(script.begun));
  script.say("one");
  c.read_head();
  EXPECT_EQ(c.read_chunk(), "one");
  server.stop();
  EXPECT_EQ(idle.read_to_end(), "");
  script.say(" two", true);
  EXPECT_EQ(c.read_chunk(), " two");
  EXPECT_EQ(c.read_chunk(), "");
  thread.join();
  EXPECT_FALSE(Client(server.port()).connected());
}

TEST(Http, StopCutsOffWhatOutlastsTheGrace) {
  Script script;
  HttpOptions o;
  o.grace = milliseconds(10);
  HttpServer server(o, scripted(script));
  std::thread thread([&] { server.run(); });
  Client c(server.port());
  c.request("GET", "/x");
  ASSERT_TRUE(happens(script.begun));
  server.stop();
  thread.join();
  EXPECT_TRUE(happens(script.gone));
  EXPECT_EQ(c.read_to_end(), "");
}

TEST(Http, PortInUseIsAnError) {
  Running s(echo);
  HttpOptions o;
  o.port = s.port();
  EXPECT_THROW(HttpServer(o, echo), std::exception);
  o.host = "no address";
  EXPECT_THROW(HttpServer(o, echo), std::exception);
}

}  // namespace
}  // namespace plumb::serve
