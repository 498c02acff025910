// samples.jsonl (train/rl_report.h) for the training view. The file may be many gigabytes: a first look notes where
// each line begins, later ones go on from there, and only the lines that are asked for are read.
#pragma once
#include <list>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "serve/training_folder.h"
#include "tokenizer/tokenizer.h"

namespace plumb::serve {

// Where the samples of each step are.
class SampleIndex {
 public:
  // Notes the lines that came since the last time; begins anew if the file is another one or shorter.
  void update(const RunFile& file);

  struct Line {
    uint64_t begin = 0, size = 0;
  };
  // In the order of the file. Lines that are no object with an integer "step" are not in it.
  const std::map<int64_t, std::vector<Line>>& steps() const { return steps_; }

 private:
  std::string identity_;
  uint64_t noted_ = 0;  // bytes
  std::map<int64_t, std::vector<Line>> steps_;
};

// One thread at a time.
class TrainingSamples {
 public:
  // The samples of the last step up to `step` that has any, else of the first one (samples_every may leave steps out):
  // {step, first, last, previous, next, total, from, samples}, `most` of them from number `from` on. Texts are cut to
  // some hundred characters. step and what belongs to it: null if there are none at all.
  nlohmann::json rows(const OpenFile& run, const std::string& name, int64_t step, size_t from, size_t most);
  // One of them with all its tokens: texts, log-probabilities, and what training computed minus what was recorded.
  // Error (ApiError, 404): not there.
  nlohmann::json whole(const OpenFile& run, const std::string& name, int64_t step, size_t index);

 private:
  SampleIndex& index_of(const std::string& name, const RunFile& file);
  const Tokenizer* tokenizer_of(const OpenFile& run);

  std::list<std::pair<std::string, SampleIndex>> indices_;  // of the runs that were asked for last
  std::string tokenizer_key_;                               // path and time of the file
  std::optional<Tokenizer> tokenizer_;
};

}  // namespace plumb::serve
