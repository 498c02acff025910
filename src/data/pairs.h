// Preference data from JSONL files: a prompt, the answer that is preferred and one that is not, in TRL's formats.
//
//   {"prompt": "...", "chosen": "...", "rejected": "..."}             texts; answer and end of sentence are trained
//   {"prompt": [...], "chosen": [...], "rejected": [...], "tools"?}   messages; what the assistant says in an answer
//   {"chosen": [...], "rejected": [...], "tools"?}                    whole conversations; the messages with which both
//                                                                     begin are the prompt
//   {"prompt": [5, 9], "chosen": [7, 1], "rejected": [8, 1]}          token ids, nothing is added; all of an answer
#pragma once
#include <string>
#include <vector>

#include "data/dataset.h"

namespace plumb {

struct PreferencePair {
  Sample chosen, rejected;  // prompt and answer; mask 1 = tokens of the answer that count
  int line = 0;             // of the file, from 1
};

struct PairDataset {
  std::vector<PreferencePair> pairs;  // in the order of the file
  int64_t truncated = 0;              // answers that lost tokens at their end because they were longer than row_tokens
  int64_t longest = 0;                // tokens of the longest answer with its prompt, before that
  int64_t left_out = 0;               // pairs of which an answer has no token that counts
};

// tokenizer may be null if all lines are token ids. options.format is not looked at: each line says what it is.
// Errors name file and line: those of read_dataset; a prompt, a chosen and a rejected answer of different kinds;
// conversations that are equal; a file without any pair.
PairDataset read_pairs(const std::string& path, const Tokenizer* tokenizer, const DatasetOptions& options);

// As hold_out of dataset.h: by a hash of a pair's tokens.
std::vector<PreferencePair> hold_out(std::vector<PreferencePair>& pairs, double fraction, const std::string& path);

uint64_t fingerprint(const std::vector<PreferencePair>& pairs);

}  // namespace plumb
