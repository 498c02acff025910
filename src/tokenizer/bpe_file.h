// tokenizer.json as data.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/bpe.h"
#include "tokenizer/bpe_added.h"

namespace plumb {

struct SplitStep {
  bool is_regex;  // else literal text
  std::string pattern;
};

struct TokenizerFile {
  std::vector<std::string> tokens;  // by id, spelled as in the file; empty: no such token. Added tokens are included.
  std::vector<Merge> merges;        // by rank
  std::vector<SplitStep> splits;    // in order
  std::vector<AddedToken> added;    // by id
  int32_t model_size = 0;           // tokens of the BPE model have ids below; added tokens may be among them
  bool ignore_merges = false;
};

// Error at "name: key" for everything that would change ids and is not implemented, and for contradictions.
TokenizerFile parse_tokenizer_file(std::string_view json, const std::string& name);

}  // namespace plumb
