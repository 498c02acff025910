// Prompts of reinforcement learning from a JSONL file: one object a line with `messages` (and `tools`), `prompt` or
// `tokens`. All other keys are for whoever rewards the answers.
#pragma once
#include <string>
#include <vector>

#include "data/dataset.h"

namespace plumb {

struct Prompt {
  std::vector<int> tokens;        // what the model goes on from
  std::vector<Message> messages;  // of format messages; empty otherwise
  ChatOptions chat;               // how further turns are written
  std::string line;               // the object as it stands in the file
  int number = 0;                 // of the line, from 1
};

// Messages must not end with an answer that is finished. Errors name file and line: those of read_dataset; no room for
// an answer, i.e. more than options.row_tokens - answer_tokens tokens; no prompt in the file.
std::vector<Prompt> read_prompts(const std::string& path, const Tokenizer* tokenizer, const DatasetOptions& options,
                                 int answer_tokens);

// A hash of all prompts in order: tells whether two runs read the same data.
uint64_t fingerprint(const std::vector<Prompt>& prompts);

}  // namespace plumb
