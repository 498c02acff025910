// The training view: a page with the curves and samples of runs, and the routes it reads them by. A run is read from
// its directory, whoever writes it, so a run that goes on and a finished one are the same to it (docs/watch.md).
#pragma once
#include <functional>
#include <optional>
#include <string>

#include <nlohmann/json.hpp>

#include "serve/background.h"
#include "serve/router.h"
#include "serve/training_folder.h"
#include "serve/training_samples.h"

namespace plumb::serve {

class TrainingView {
 public:
  // runs: a folder of runs, or a run; "" = none, the page then says how to name one. chat: whether "/" of this server
  // is the chat page. Error: no folder.
  TrainingView(const std::string& runs, bool chat);
  // Outlives the router's last request.
  void add_routes(Router& router);

 private:
  // What is asked for in a run: with its name, its folder and the query.
  using InRun = std::function<nlohmann::json(const std::string& name, const OpenFile& run, const Query& query)>;
  void add(Router& router, const std::string& path, InRun what);
  HttpReply list() const;

  std::optional<RunsFolder> folder_;
  bool chat_;
  TrainingSamples samples_;  // of the background's thread
  Background background_;    // last: its thread ends before what it uses
};

}  // namespace plumb::serve
