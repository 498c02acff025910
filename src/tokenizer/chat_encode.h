// Conversations to token ids, with the mask that supervised training needs.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/chat_render.h"
#include "tokenizer/tokenizer.h"

namespace plumb {

// What the chat format asks of a tokenizer. Control tokens are found by their spelling: ids differ between
// vocabularies.
struct ChatTokenizer {
  std::function<std::vector<int32_t>(std::string_view)> encode_text;  // without the added vocabulary
  std::function<std::optional<int32_t>(std::string_view)> token_to_id;
  std::function<std::string(int32_t)> id_to_bytes;  // what the token adds to a text; may be part of a character
};

ChatTokenizer chat_tokenizer(const Tokenizer& tokenizer);  // shares its vocabulary

struct ChatTokens {
  std::vector<int32_t> ids;
  std::vector<uint8_t> mask;  // 1: the model is to produce this token (reasoning, content, calls, end of sentence)
};

// Error: a control token that the conversation needs is not in the vocabulary.
ChatTokens encode_pieces(const std::vector<ChatPiece>& pieces, const ChatTokenizer& tokenizer);

// A training sample: render_chat. The mask is 1 in every assistant turn with Message::trained.
ChatTokens encode_for_training(const std::vector<Message>& messages, const ChatOptions& options,
                               const ChatTokenizer& tokenizer);

// What the model is to continue: render_prompt.
std::vector<int32_t> encode_prompt(const std::vector<Message>& messages, const ChatOptions& options,
                                   const ChatTokenizer& tokenizer, bool start_call = false);

}  // namespace plumb
