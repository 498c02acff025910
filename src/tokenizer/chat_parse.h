// Reads the text of one finished assistant turn, exactly as chat_render writes it. For what a model really says, token
// by token, see chat_stream.h.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/chat_types.h"

namespace plumb {

struct ParsedTurn {
  std::string reasoning, content;  // not trimmed
  std::vector<ToolCall> calls;     // ids are empty: they are not part of the text
};

// `text` begins after the header of the turn (inside the reasoning if the mode is thinking) and ends with the
// end-of-sentence token, which may be missing only after a block of calls. Values that are not strings go into
// `arguments` unchecked, so that these may be invalid JSON. Error: anything else than the exact form; control tokens
// inside reasoning or content.
ParsedTurn parse_turn(std::string_view text, ThinkingMode mode);

}  // namespace plumb
