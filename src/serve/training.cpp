#include "serve/training.h"

#include <fmt/format.h>

#include <limits>
#include <memory>

#include "serve/errors.h"
#include "serve/request_fields.h"
#include "serve/training_runs.h"

namespace plumb::serve {
namespace {

using nlohmann::json;

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

// Figures of a run change under the same address.
HttpReply fresh_reply(const json& body) {
  return {200, "application/json", dump(body), {{"Cache-Control", "no-store"}}};
}

Place place_in(const Query& query) {
  const std::string* file = query.find("file");
  return {file ? *file : "", static_cast<uint64_t>(query.integer("from", 0, 0, kMost))};
}

// For Background, whose works must not throw.
HttpReply reply_of(const std::function<HttpReply()>& work) {
  try {
    return work();
  } catch (...) {
    return error_reply(ErrorForm::openai, error_of(std::current_exception()));
  }
}

}  // namespace

TrainingView::TrainingView(const std::string& runs, bool chat) : chat_(chat) {
  if (!runs.empty()) folder_.emplace(runs);
}

HttpReply TrainingView::list() const {
  json runs = json::array();
  if (folder_)
    for (const std::string& name : folder_->names())
      if (const OpenFile run = folder_->open(name)) runs.push_back(run_at_a_glance(run, name));
  return fresh_reply(
      {{"folder", folder_ ? json(folder_->path()) : json()}, {"chat", chat_}, {"runs", std::move(runs)}});
}

// Files are read on the background's thread: a slow disk holds no connection up.
void TrainingView::add(Router& router, const std::string& path, InRun what) {
  router.add({"GET", path, [this, what = std::move(what)](const HttpRequest& request, Wake wake) -> Answered {
                const auto work = [this, what, query = Query(request.query)] {
                  const std::string& name = query.need("run");
                  const OpenFile run = folder_ ? folder_->open(name) : OpenFile();
                  if (!run) refuse("run", "'" + name + "' is no run", "GET /training/runs lists them", 404);
                  return fresh_reply(what(name, run, query));
                };
                return background_.answer([work] { return reply_of(work); }, std::move(wake));
              }});
}

void TrainingView::add_routes(Router& router) {
  router.add_file("/training", "training.html", "text/html; charset=utf-8", true);
  router.add_file("/training/curves.js", "training_curves.js", "text/javascript; charset=utf-8", true);
  router.add({"GET", "/training/runs", [this](const HttpRequest&, Wake wake) -> Answered {
                return background_.answer([this] { return reply_of([this] { return list(); }); }, std::move(wake));
              }});
  add(router, "/training/metrics",
      [](const std::string&, const OpenFile& run, const Query& query) { return metrics_from(run, place_in(query)); });
  add(router, "/training/warnings",
      [](const std::string&, const OpenFile& run, const Query& query) { return warnings_from(run, place_in(query)); });
  add(router, "/training/samples", [this](const std::string& name, const OpenFile& run, const Query& query) {
    const int64_t step = query.integer("step", kMost, 0, kMost), from = query.integer("from", 0, 0, kMost),
                  most = query.integer("limit", 200, 1, 1000);
    return samples_.rows(run, name, step, static_cast<size_t>(from), static_cast<size_t>(most));
  });
  add(router, "/training/sample", [this](const std::string& name, const OpenFile& run, const Query& query) {
    query.need("step"), query.need("index");
    return samples_.whole(run, name, query.integer("step", 0, 0, kMost),
                          static_cast<size_t>(query.integer("index", 0, 0, kMost)));
  });
}

}  // namespace plumb::serve
