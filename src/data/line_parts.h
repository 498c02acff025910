// What the readers of training samples and of prompts have in common. Private to the room. `where` is "file:line".
#pragma once
#include <string>
#include <vector>

#include "tokenizer/chat_types.h"
#include "tokenizer/python_json.h"

namespace plumb {

// The value of a key; error if it is missing or of another type. format: for the fix.
const Json& require(const Json& line, const char* key, Json::Kind kind, const std::string& where,
                    const std::string& format);

// The whole number that a JSON value spells, or -1: the caller's error names the value.
int whole_number(const Json& value);

std::vector<int> read_token_ids(const Json& line, const char* key, const std::string& where);
void check_vocabulary(const std::vector<int>& tokens, int vocab_size, const std::string& where);

// A line may choose its own mode, so that one file teaches both.
ChatOptions line_chat_options(const Json& line, const ChatOptions& base);

}  // namespace plumb
