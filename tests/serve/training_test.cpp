// The training view's routes over real sockets: runs as other processes write them, and names as nobody should send
// them.
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/error.h"
#include "serve/client.h"
#include "serve/exchange.h"
#include "serve/router.h"
#include "serve/training_samples.h"
#include "serve/training_server.h"
#include "support/temp_path.h"

namespace plumb {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::Client;
using testing::Reply;

void append(const std::string& file, const std::string& text) { std::ofstream(file, std::ios::app) << text; }

std::string line(int step, double reward = 0) {
  return json{{"step", step}, {"time", 1000 + step}, {"reward", reward}}.dump() + "\n";
}
// As write_samples does; ids of the embedded model.
std::string sample_line(int step, int number, const json& logprobs, const json& difference) {
  nlohmann::ordered_json s = {{"step", step},         {"number", number},       {"answer", "maybe"},
                              {"reward", 1},          {"advantage", 0.5},       {"trained", true},
                              {"prompt_tokens", {5}}, {"tokens", {438, 460, 1}}};
  s["logprobs"] = logprobs, s["difference"] = difference;
  return s.dump() + "\n";
}

class Watching {
 public:
  explicit Watching(const std::string& folder, std::vector<std::string> keys = {})
      : server_(folder, std::move(keys), {}), thread_([this] { server_.run(); }) {}
  ~Watching() {
    server_.stop();
    thread_.join();
  }
  Reply get(const std::string& path, const std::string& headers = "") const {
    Client c(server_.port());
    c.request("GET", path, "", headers);
    return c.read_reply();
  }
  json ask(const std::string& path) const {
    const Reply r = get("/training/" + path);
    EXPECT_EQ(r.status, 200) << path << ": " << r.body;
    return json::parse(r.body, nullptr, false);
  }

 private:
  serve::TrainingServer server_;
  std::thread thread_;
};

// A fresh folder with the run "a".
std::string runs_folder(const std::string& name) {
  const std::string folder = testing::temp_path("training_" + name);
  fs::create_directories(folder + "/a");
  append(folder + "/a/metrics.jsonl", line(1) + line(2));
  return folder;
}

std::vector<std::string> names(const json& list) {
  std::vector<std::string> found;
  for (const json& run : list["runs"]) found.push_back(run["run"]);
  return found;
}
std::vector<int> steps(const json& part) {
  std::vector<int> found;
  for (const json& l : part["lines"]) found.push_back(l["step"]);
  return found;
}
std::string place(const json& part) {
  return "&file=" + part["file"].get<std::string>() + "&from=" + std::to_string(part["next"].get<int64_t>());
}

// ---- Runs ----------------------------------------------------------------------------------------------------------

TEST(Training, RunsAreFoundBelowTheFolderAndNeverThroughALink) {
  const std::string folder = runs_folder("found"), outside = testing::temp_path("training_outside");
  for (const std::string& f :
       {folder + "/sweep/1", folder + "/sweep/2", folder + "/.hidden", folder + "/empty", outside})
    fs::create_directories(f);
  for (const std::string& f : {folder + "/sweep/1", folder + "/sweep/2", folder + "/.hidden", outside})
    append(f + "/config.toml", "[rl]\n");
  append(folder + "/a/b\x01.txt", "");
  fs::create_directories(folder + "/bad\xff");
  append(folder + "/bad\xff/config.toml", "[rl]\n");
  fs::create_directory_symlink(outside, folder + "/link");
  const Watching w(folder);
  EXPECT_EQ(names(w.ask("runs")), (std::vector<std::string>{"a", "sweep/1", "sweep/2"}));
  EXPECT_EQ(w.ask("runs")["folder"], fs::canonical(folder).string());
  for (const char* name : {"link",   "empty",         ".hidden",   "bad%FF", "..",         "../training_outside",
                           "a/..",   "a/../a",        "/a",        "a/",     "a//",        "",
                           "sweep",  "sweep//1",      "sweep/./1", "a%00",   "a%00/../..", "%2e%2e",
                           "%2Fetc", "sweep/1/2/3/4", "a%0A"}) {
    const Reply r = w.get(std::string("/training/metrics?run=") + name);
    EXPECT_EQ(r.status, *name ? 404 : 400) << name;
    EXPECT_EQ(json::parse(r.body)["error"]["param"], "run") << name;
  }
  EXPECT_EQ(w.get("/training/metrics?run=sweep%2F1").status, 200);
  EXPECT_EQ(w.get("/training/metrics").status, 400);
}

TEST(Training, AFolderThatIsARunIsTheOnlyOne) {
  const std::string folder = runs_folder("single");
  fs::create_directories(folder + "/a/checkpoints");
  append(folder + "/a/checkpoints/config.toml", "");
  const Watching w(folder + "/a/");
  EXPECT_EQ(names(w.ask("runs")), std::vector<std::string>{"a"});
  EXPECT_EQ(steps(w.ask("metrics?run=a")), (std::vector<int>{1, 2}));
  EXPECT_EQ(w.get("/training/metrics?run=checkpoints").status, 404);
  EXPECT_THROW(Watching(folder + "/nothing"), Error);
  EXPECT_THROW(Watching(folder + "/a/metrics.jsonl"), Error);
}

TEST(Training, StateComesFromTheLockTheLogAndTheClock) {
  const std::string folder = runs_folder("state"), run = folder + "/a";
  append(run + "/config.toml", "[model]\npath = \"x\"\n\n[train]\nsteps = 0\n\n[lora]\nsteps = 9\n");
  append(run + "/log.txt", "2026-11-30 17:42:54 info    steps          1,234, 5 of them done\n");
  const Watching w(folder);
  const auto glance = [&] { return w.ask("runs")["runs"][0]; };
  EXPECT_EQ(glance()["state"], "running");  // it has just been written
  for (const char* file : {"/metrics.jsonl", "/log.txt"})
    fs::last_write_time(run + file, fs::file_time_type::clock::now() - std::chrono::hours(1));
  EXPECT_EQ(glance()["state"], "stopped");
  EXPECT_EQ(glance()["total_steps"], 1234);
  EXPECT_EQ(glance()["step"], 2);
  EXPECT_EQ(glance()["command"], "train");
  EXPECT_EQ(glance()["latest"]["reward"], 0);
  {
    const serve::OpenFile lock(::open(run.c_str(), O_RDONLY | O_DIRECTORY));
    ASSERT_EQ(::flock(lock.fd(), LOCK_EX | LOCK_NB), 0);
    EXPECT_EQ(glance()["state"], "running");
  }
  append(run + "/log.txt", "2026-11-30 17:43:05 info    done: 2 steps, loss 1\n");
  EXPECT_EQ(glance()["state"], "finished");
  append(run + "/metrics.jsonl", line(3));  // started again with more steps
  EXPECT_EQ(glance()["state"], "running");
}

// ---- Lines from some place on --------------------------------------------------------------------------------------

TEST(Training, OnlyNewLinesAreReadAndHalfALineWaits) {
  const std::string folder = runs_folder("lines"), file = folder + "/a/metrics.jsonl";
  const Watching w(folder);
  json part = w.ask("metrics?run=a");
  EXPECT_EQ(steps(part), (std::vector<int>{1, 2}));
  const std::string third = line(3);
  append(file, third.substr(0, 9));
  part = w.ask("metrics?run=a" + place(part));
  EXPECT_EQ(steps(part), std::vector<int>{});
  append(file, third.substr(9) + line(4));
  const int64_t from = part["next"];
  part = w.ask("metrics?run=a" + place(part));
  EXPECT_EQ(part["from"], from);
  EXPECT_EQ(steps(part), (std::vector<int>{3, 4}));
  EXPECT_EQ(part["next"], fs::file_size(file));
}

TEST(Training, AFileThatIsWrittenAnewIsReadFromItsBeginning) {
  const std::string folder = runs_folder("anew"), file = folder + "/a/metrics.jsonl";
  const Watching w(folder);
  const json part = w.ask("metrics?run=a");
  // As a run that goes on from step 1 does it (base/files.h), and longer than before.
  append(file + ".new", line(1) + line(2, 5) + line(3, 5) + line(4, 5));
  fs::rename(file + ".new", file);
  const json anew = w.ask("metrics?run=a" + place(part));
  EXPECT_EQ(anew["from"], 0);
  EXPECT_NE(anew["file"], part["file"]);
  EXPECT_EQ(steps(anew), (std::vector<int>{1, 2, 3, 4}));
  // Cut off in place; a place in the middle of a line; one behind the end.
  fs::resize_file(file, line(1).size());
  EXPECT_EQ(steps(w.ask("metrics?run=a" + place(anew))), std::vector<int>{1});
  for (const char* from : {"3", "100000000"}) {
    const json r = w.ask("metrics?run=a&file=" + anew["file"].get<std::string>() + "&from=" + from);
    EXPECT_EQ(r["from"], 0) << from;
  }
  for (const char* from : {"-1", "x", "", "1.5", "9223372036854775808"})
    EXPECT_EQ(w.get(std::string("/training/metrics?run=a&from=") + from).status, 400) << from;
}

TEST(Training, WhatIsNoLineOfFiguresIsCountedAndPassedOver) {
  const std::string folder = runs_folder("garbage"), file = folder + "/a/metrics.jsonl";
  const std::string deep =
      R"({"step":7,"x":)" + std::string(200'000, '[') + std::string(200'000, ']') + ",\"loss\":2}\n";
  append(file, "\n\xff\xfe\n[1]\nnull\n{\"step\":\"x\"}\n{\"step\":1.5}\n" + std::string("\0\0", 2) + "\n" + deep +
                   line(8) + "{\"step\":9");
  const Watching w(folder);
  const json part = w.ask("metrics?run=a");
  EXPECT_EQ(steps(part), (std::vector<int>{1, 2, 7, 8}));
  EXPECT_EQ(part["skipped"], 7);
  EXPECT_EQ(part["lines"][2], (json{{"step", 7}, {"loss", 2}}));
  EXPECT_EQ(w.ask("runs")["runs"][0]["step"], 8);
}

TEST(Training, LongFilesComeInParts) {
  const std::string folder = runs_folder("parts"), file = folder + "/a/metrics.jsonl";
  std::string text;
  int last = 2;
  while (text.size() < (size_t{5} << 19)) text += line(++last);
  append(file, text);
  const Watching w(folder);
  json part = w.ask("metrics?run=a");
  int expected = 1, parts = 0;
  for (;; part = w.ask("metrics?run=a" + place(part))) {
    for (int step : steps(part)) ASSERT_EQ(step, expected++);
    ++parts;
    if (!part["more"].get<bool>()) break;
  }
  EXPECT_EQ(expected, last + 1);
  EXPECT_EQ(parts, 3);
}

TEST(Training, ALineOfManyMegabytesIsPassedOver) {
  const std::string folder = runs_folder("huge"), file = folder + "/a/metrics.jsonl";
  fs::resize_file(file, size_t{80} << 20);  // zeros
  append(file, "\n" + line(3));
  const Watching w(folder);
  const json part = w.ask("metrics?run=a");
  EXPECT_EQ(steps(part), (std::vector<int>{1, 2}));
  EXPECT_EQ(part["skipped"], 1);
  EXPECT_EQ(part["more"], true);
  EXPECT_EQ(steps(w.ask("metrics?run=a" + place(part))), std::vector<int>{3});
  EXPECT_EQ(w.ask("runs")["runs"][0]["step"], 3);
}

TEST(Training, WhatIsNoFileIsNotOpened) {
  const std::string folder = runs_folder("no_file"), run = folder + "/a";
  append(run + "/config.toml", "[rl]\n");
  append(folder + "/secret", line(99));
  fs::remove(run + "/metrics.jsonl");
  fs::create_symlink(folder + "/secret", run + "/metrics.jsonl");
  ASSERT_EQ(::mkfifo((run + "/log.txt").c_str(), 0600), 0);  // opening it would wait for a writer
  fs::create_directory(run + "/samples.jsonl");
  const Watching w(folder);
  EXPECT_EQ(w.ask("metrics?run=a")["lines"], json::array());
  EXPECT_EQ(w.ask("warnings?run=a")["lines"], json::array());
  EXPECT_EQ(w.ask("samples?run=a")["step"], nullptr);
  EXPECT_EQ(w.ask("runs")["runs"][0]["has_samples"], false);
}

TEST(Training, WarningsOfTheLog) {
  const std::string folder = runs_folder("warnings"), file = folder + "/a/log.txt";
  append(file, "2026-11-30 17:43:05 info    all is well\n2026-11-30 17:43:06 warning step 3: <b>\nits second line\n");
  const Watching w(folder);
  const json part = w.ask("warnings?run=a");
  EXPECT_EQ(part["lines"],
            json::array({{{"time", "2026-11-30 17:43:06"}, {"level", "warning"}, {"message", "step 3: <b>"}}}));
  append(file, "2026-11-30 17:43:07 error   gone\n");
  EXPECT_EQ(w.ask("warnings?run=a" + place(part))["lines"][0]["message"], "gone");
}

// ---- Samples -------------------------------------------------------------------------------------------------------

TEST(Training, SamplesOfAStep) {
  const std::string folder = runs_folder("samples"), file = folder + "/a/samples.jsonl";
  append(folder + "/a/config.toml", "[model]\npath = \"" PLUMB_SOURCE_DIR "/assets/tiny\"\n\n[rl]\n");
  append(file, sample_line(5, 0, {-1, -2, -3}, {0, 0, 0}) + sample_line(5, 1, {-1, nullptr, -3}, {0, -0.25}) +
                   "garbage\n" + sample_line(10, 0, {-1, -2, -3}, json::array()) +
                   R"({"x":1,"step":12,"tokens":"?","logprobs":7,"metrics":[1]})"
                   "\n");
  const Watching w(folder);
  const json five = w.ask("samples?run=a&step=7");
  EXPECT_EQ(five["step"], 5);
  EXPECT_EQ(five["previous"], nullptr);
  EXPECT_EQ(five["next"], 10);
  EXPECT_EQ(five["first"], 5);
  EXPECT_EQ(five["last"], 12);
  ASSERT_EQ(five["samples"].size(), 2u);
  EXPECT_EQ(five["samples"][0]["compared_tokens"], 3);
  EXPECT_EQ(five["samples"][0]["mismatch_tokens"], 0);
  EXPECT_EQ(five["samples"][1]["mismatch_tokens"], 1);
  EXPECT_EQ(five["samples"][1]["mismatch_max"], 0.25);
  EXPECT_EQ(w.ask("samples?run=a&step=0")["step"], 5);
  EXPECT_EQ(w.ask("samples?run=a")["step"], 12);
  EXPECT_EQ(w.ask("samples?run=a&step=5&from=1&limit=1")["samples"][0]["index"], 1);

  const json whole = w.ask("sample?run=a&step=5&index=1");
  EXPECT_EQ(whole["texts"], (json{"yes", "no", "<｜end▁of▁sentence｜>"}));
  EXPECT_EQ(whole["differences"], (json{0, nullptr, -0.25}));  // the reply of the environment has none
  EXPECT_EQ(whole["logprobs"], (json{-1, nullptr, -3}));
  EXPECT_EQ(w.ask("sample?run=a&step=10&index=0")["differences"], (json{nullptr, nullptr, nullptr}));
  EXPECT_EQ(w.ask("sample?run=a&step=12&index=0")["tokens"], json::array());
  for (const char* path : {"step=5&index=2", "step=6&index=0", "step=12&index=1"})
    EXPECT_EQ(w.get(std::string("/training/sample?run=a&") + path).status, 404) << path;
  for (const char* path :
       {"sample?run=a&step=5", "sample?run=a&index=0", "samples?run=a&limit=0", "samples?run=a&step=x"})
    EXPECT_EQ(w.get(std::string("/training/") + path).status, 400) << path;

  append(file, sample_line(12, 1, {-1, -2, -3}, {0, 0, 0}));
  EXPECT_EQ(w.ask("samples?run=a")["total"], 2);
}

TEST(Training, WithoutATokenizerNumbersStay) {
  const std::string folder = runs_folder("no_tokenizer");
  append(folder + "/a/samples.jsonl", sample_line(1, 0, {-1, -2, -3}, {0, 0, 0}));
  const Watching w(folder);
  EXPECT_EQ(w.ask("sample?run=a&step=1&index=0")["texts"], nullptr);
  EXPECT_EQ(w.ask("samples?run=a")["samples"][0]["answer"], "maybe");
}

// The index must not read again what it has noted: a line that is changed behind its back is not seen.
TEST(Training, TheIndexGoesOnWhereItWas) {
  const std::string folder = runs_folder("index"), file = folder + "/a/samples.jsonl";
  append(file, "{\"step\":1,\"a\":1}\n{\"step\":1,\"a\":2}\n");
  const serve::OpenFile run = serve::RunsFolder(folder).open("a");
  serve::SampleIndex index;
  index.update(*serve::open_run_file(run, "samples.jsonl"));
  EXPECT_EQ(index.steps().at(1).size(), 2u);
  std::fstream(file, std::ios::in | std::ios::out).seekp(8) << '7';
  append(file, "{\"step\":2,\"a\":3}\n");
  index.update(*serve::open_run_file(run, "samples.jsonl"));
  EXPECT_EQ(index.steps().size(), 2u);
  EXPECT_EQ(index.steps().at(1).size(), 2u);
  EXPECT_EQ(index.steps().at(2)[0].begin, 34u);
  fs::resize_file(file, 17);  // shorter: it begins anew
  index.update(*serve::open_run_file(run, "samples.jsonl"));
  EXPECT_EQ(index.steps().size(), 1u);
  EXPECT_TRUE(index.steps().contains(7));
}

// ---- The server ----------------------------------------------------------------------------------------------------

TEST(Training, KeysOpenEverythingButThePage) {
  const Watching w(runs_folder("keys"), {"secret"});
  for (const char* path : {"/", "/training", "/training/curves.js", "/health"})
    EXPECT_EQ(w.get(path).status, 200) << path;
  for (const char* path : {"/training/runs", "/training/metrics?run=a", "/training/samples?run=a"}) {
    EXPECT_EQ(w.get(path).status, 401) << path;
    EXPECT_EQ(w.get(path, "Authorization: Bearer secret\r\n").status, 200) << path;
  }
}

TEST(Query, ReadsWhatABrowserSends) {
  const serve::Query q("run=a%20b%2fc+d&empty=&run=second&flag&n=12&=x&%");
  EXPECT_EQ(q.need("run"), "a b/c d");
  EXPECT_EQ(q.find("flag"), nullptr);
  EXPECT_EQ(*q.find("empty"), "");
  EXPECT_EQ(q.integer("n", 0, 0, 12), 12);
  EXPECT_EQ(q.integer("absent", 3, 0, 12), 3);
  EXPECT_THROW(q.integer("n", 0, 0, 11), serve::ApiError);
  EXPECT_THROW(q.need("empty"), serve::ApiError);
}

}  // namespace
}  // namespace plumb
