#include "serve/training_runs.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <optional>
#include <sstream>

namespace plumb::serve {
namespace {

using nlohmann::json;

constexpr size_t kEnds = size_t{64} << 10;     // read of both ends of a file for a glance
constexpr size_t kOneReply = size_t{1} << 20;  // bytes of lines in a reply
constexpr double kQuietSeconds = 30;           // a run that wrote within them is alive

json parse(std::string_view text) { return json::parse(text, nullptr, false); }

// The figures of a line; null if it is no object with an integer "step".
json figures(std::string_view text) {
  json line = parse(text);
  if (!line.is_object() || !line.contains("step") || !line["step"].is_number_integer()) return {};
  return numbers_of(line);
}

// The first and the last whole line of metrics; null if there is none.
json first_line(const RunFile& f) {
  const std::string head = read_part(f, 0, kEnds);
  return figures(std::string_view(head).substr(0, head.find('\n')));
}
json last_line(const RunFile& f) {
  const uint64_t from = f.size > kEnds ? f.size - kEnds : 0;
  const std::string tail = read_part(f, from, kEnds);
  for (size_t end = tail.rfind('\n'); end != tail.npos && end > 0;) {
    const size_t before = tail.rfind('\n', end - 1);
    const size_t begin = before == tail.npos ? 0 : before + 1;
    if (json line = figures(std::string_view(tail).substr(begin, end - begin)); !line.is_null()) return line;
    end = before;
  }
  return {};
}

// The number behind the last occurrence of `words`, "1,234" being 1234.
std::optional<int64_t> last_number(std::string_view text, std::string_view words) {
  const size_t at = text.rfind(words);
  if (at == text.npos) return {};
  std::string digits;
  for (char c : text.substr(at + words.size())) {
    if (c >= '0' && c <= '9')
      digits += c;
    else if (c != ',' && !(c == ' ' && digits.empty()))
      break;
  }
  int64_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  return error == std::errc() && !digits.empty() ? std::optional(value) : std::nullopt;
}

// What the log of a run tells of its length: the plan at the start, the summary at the end.
struct Length {
  std::optional<int64_t> planned, done;
};
Length length_in_log(const OpenFile& run) {
  const auto log = open_run_file(run, "log.txt");
  if (!log) return {};
  const std::string tail = read_part(*log, log->size > kEnds ? log->size - kEnds : 0, kEnds);
  Length l{last_number(tail, " info    steps "), last_number(tail, " info    done: ")};
  if (!l.planned) l.planned = last_number(read_part(*log, 0, kEnds), " info    steps ");
  return l;
}

double now() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

const char* command_of(const std::string& toml) {
  if (toml.empty()) return nullptr;
  const auto has = [&](const char* table) { return ("\n" + toml).find("\n[" + std::string(table) + "]") != toml.npos; };
  for (const char* command : {"rl", "dpo", "pretrain"})
    if (has(command)) return command;
  return "train";
}

template <class OnText>  // bool(string_view): whether the line could be read
json lines_from(const OpenFile& run, const std::string& name, const Place& place, const OnText& on_text) {
  const auto f = open_run_file(run, name);
  if (!f) return {{"file", ""}, {"from", 0}, {"next", 0}, {"more", false}, {"skipped", 0}};
  const uint64_t from = place.file == f->identity && begins_line(*f, place.from) ? place.from : 0;
  int64_t skipped = 0;
  const uint64_t next = for_each_line(*f, from, kOneReply, [&](uint64_t, std::optional<std::string_view> text) {
    skipped += !text || !on_text(*text);
  });
  return {
      {"file", f->identity}, {"from", from}, {"next", next}, {"more", next - from >= kOneReply}, {"skipped", skipped}};
}

}  // namespace

json numbers_of(const json& object) {
  json numbers = json::object();
  for (const auto& [name, value] : object.items())
    if (value.is_number()) numbers[name] = value;
  return numbers;
}

std::string config_text(const OpenFile& run) {
  const auto f = open_run_file(run, "config.toml");
  return f ? read_part(*f, 0, kEnds) : "";
}

std::string value_in(const std::string& toml, const std::string& table, const std::string& key) {
  std::istringstream in(toml);
  bool inside = false;
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("[")) inside = line == "[" + table + "]";
    if (!inside || !line.starts_with(key + " = ")) continue;
    const std::string value = line.substr(key.size() + 3);
    // A basic string of TOML is one of JSON, as far as to_toml writes them.
    if (const json text = parse(value); text.is_string()) return text.get<std::string>();
    return value;
  }
  return "";
}

json run_at_a_glance(const OpenFile& run, const std::string& name) {
  const std::string config = config_text(run);
  const auto metrics = open_run_file(run, "metrics.jsonl"), samples = open_run_file(run, "samples.jsonl"),
             log = open_run_file(run, "log.txt");
  json first, latest;
  double updated = 0;
  if (metrics) first = first_line(*metrics), latest = last_line(*metrics);
  for (const auto* f : {&metrics, &samples, &log})
    if (*f) updated = std::max(updated, (*f)->modified);

  const json step = latest.is_object() ? latest["step"] : json();
  const Length length = length_in_log(run);
  json total = length.planned ? json(*length.planned) : json();
  if (const auto steps = last_number("\n" + value_in(config, "train", "steps"), "\n"); steps > 0) total = *steps;
  const double age = std::max(0.0, now() - updated);
  // A run that is started again has its old summary in the log: the summary counts if it is of the last step there is.
  const bool done = length.done && (step.is_null() || *length.done >= step.get<int64_t>());
  const bool alive = is_locked(run) || (!done && age < kQuietSeconds);
  return {{"run", name},
          {"command", command_of(config) ? json(command_of(config)) : json()},
          {"state", alive  ? "running"
                    : done ? "finished"
                           : "stopped"},
          {"step", step},
          {"total_steps", total},
          {"started", first.is_object() && first.contains("time") ? first["time"] : json()},
          {"updated", updated},
          {"age_seconds", age},
          {"has_samples", samples && samples->size > 0},
          {"latest", latest}};
}

json metrics_from(const OpenFile& run, const Place& place) {
  json lines = json::array();
  json reply = lines_from(run, "metrics.jsonl", place, [&](std::string_view text) {
    json line = figures(text);
    if (line.is_null()) return false;
    lines.push_back(std::move(line));
    return true;
  });
  reply["lines"] = std::move(lines);
  return reply;
}

json warnings_from(const OpenFile& run, const Place& place) {
  json lines = json::array();
  json reply = lines_from(run, "log.txt", place, [&](std::string_view text) {
    // "2026-11-30 17:43:05 warning message"; lines of a message behind its first one have no date and are passed over.
    constexpr size_t kTime = 19, kLevel = 20, kMessage = 28;
    if (text.size() <= kMessage || text[4] != '-' || text[kTime] != ' ') return true;
    for (const char* level : {"warning", "error"})
      if (text.substr(kLevel).starts_with(level))
        lines.push_back({{"time", text.substr(0, kTime)}, {"level", level}, {"message", text.substr(kMessage)}});
    return true;
  });
  reply["lines"] = std::move(lines);
  return reply;
}

}  // namespace plumb::serve
