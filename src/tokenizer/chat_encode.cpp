#include "tokenizer/chat_encode.h"

#include "base/error.h"

namespace plumb {

ChatTokens encode_pieces(const std::vector<ChatPiece>& pieces, const ChatTokenizer& tokenizer) {
  ChatTokens out;
  for (const ChatPiece& piece : pieces) {
    if (piece.control) {
      std::optional<int32_t> id = tokenizer.token_to_id(piece.text);
      if (!id)
        fail("tokenizer", "the vocabulary has no token " + piece.text, "use the tokenizer.json of a DeepSeek-V4 model");
      out.ids.push_back(*id);
    } else {
      std::vector<int32_t> ids = tokenizer.encode_text(piece.text);
      out.ids.insert(out.ids.end(), ids.begin(), ids.end());
    }
    out.mask.resize(out.ids.size(), piece.target);
  }
  return out;
}

ChatTokens encode_for_training(const std::vector<Message>& messages, const ChatOptions& options,
                               const ChatTokenizer& tokenizer) {
  return encode_pieces(render_chat(messages, options), tokenizer);
}

std::vector<int32_t> encode_prompt(const std::vector<Message>& messages, const ChatOptions& options,
                                   const ChatTokenizer& tokenizer, bool start_call) {
  return encode_pieces(render_prompt(messages, options, start_call), tokenizer).ids;
}

}  // namespace plumb
