// Training samples from JSONL files: one JSON object a line, in one of four formats (docs/training.md).
//
//   messages    {"messages": [...], "tools": [...]}   assistant turns are trained, see tokenizer/chat_encode.h
//   prompt      {"prompt": "...", "completion": "..."} the completion and the end of sentence are trained
//   tokens      {"tokens": [5, 9, ...], "mask": [0, 1, ...]} tokens with mask 1 are trained; no mask: all of them
//   text        {"text": "..."}                       all of it is trained
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "config/model_config.h"
#include "config/run_config.h"
#include "tokenizer/chat_types.h"
#include "tokenizer/tokenizer.h"

namespace plumb {

struct Sample {
  std::vector<int> tokens;
  std::vector<uint8_t> mask;  // as many: 1 = the loss counts the prediction of this token from those before it.
                              // Always 0 for the first token, which nothing predicts.
  int line = 0;               // of the file, from 1
  int64_t trained() const;    // tokens with mask 1
};

struct DatasetOptions {
  std::string format = "auto";  // auto, messages, prompt, tokens, text
  ChatOptions chat;             // messages only
  int row_tokens = 2048;        // longest sample
  int vocab_size = 0;
  int bos = 0, eos = 1;  // put around prompt + completion and text
};
DatasetOptions dataset_options(const DataKeys& keys, const ModelConfig& model);

struct Dataset {
  std::string format;           // what the file holds
  std::vector<Sample> samples;  // in the order of the file
  int64_t truncated = 0;        // samples that lost tokens at their end because they were longer than row_tokens
  int64_t longest = 0;          // tokens of the longest sample, before that
  int64_t untrained = 0;        // samples that were left out because no token of them is trained
};

// Format auto is that of the first line; the other lines must have it too. A sample longer than row_tokens is cut off
// at its end and counted; text is instead continued in further samples, so that nothing of it is lost. tokenizer may be
// null for format tokens. Errors name file and line, say what is wrong and what is allowed: a line that is no JSON
// object, a key that is missing or of the wrong type, a token that is not in the vocabulary, a mask of another length,
// a file without any trained token.
Dataset read_dataset(const std::string& path, const Tokenizer* tokenizer, const DatasetOptions& options);

// Moves about `fraction` of the samples to the second list, by a hash of their tokens: what is held out does not depend
// on the order of the file, on other samples or on the machine, and equal samples stay together. With fraction > 0
// at least one sample is held out and at least one is left. Error: fewer than two different samples.
std::vector<Sample> hold_out(std::vector<Sample>& samples, double fraction, const std::string& path);

// A hash of all tokens and masks in order: tells whether two runs read the same data.
uint64_t fingerprint(const std::vector<Sample>& samples);

}  // namespace plumb
