// Routes and answers over a real socket.
#include <gtest/gtest.h>

#include "serve/serving.h"

namespace plumb {
namespace {

using nlohmann::json;
using testing::Client;
using testing::Reply;
using testing::Serving;

const char* kPlain = R"({"prompt": [5, 6, 7], "max_tokens": 6})";
const char* kStream = R"({"prompt": [5, 6, 7], "max_tokens": 6, "stream": true})";

TEST(Server, HealthVersionAndModels) {
  Serving s;
  const Reply health = s.ask("GET", "/health");
  EXPECT_EQ(health.status, 200);
  EXPECT_EQ(json::parse(health.body)["status"], "ok");
  EXPECT_EQ(json::parse(s.ask("GET", "/version").body)["version"], "test");
  const json models = json::parse(s.ask("GET", "/v1/models").body);
  ASSERT_EQ(models["data"].size(), 1u);
  EXPECT_EQ(models["data"][0]["id"], "tiny");
  EXPECT_EQ(models["data"][0]["max_model_len"], 4096);
}

TEST(Server, StreamHasTheTokensOfTheWholeAnswer) {
  Serving s;
  const Reply whole = s.ask("POST", "/plain", kPlain), stream = s.ask("POST", "/plain", kStream);
  ASSERT_EQ(whole.status, 200);
  ASSERT_EQ(stream.status, 200);
  EXPECT_EQ(stream.headers.at("content-type"), "text/event-stream");
  std::string expected = "data: begin\n\n";
  for (int id : json::parse(whole.body)["tokens"][0].get<std::vector<int>>())
    expected += "data: 0:" + std::to_string(id) + "\n\n";
  EXPECT_EQ(stream.body, expected + "data: end\n\n");
}

}  // namespace
}  // namespace plumb
