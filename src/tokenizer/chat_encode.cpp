#include "tokenizer/chat_encode.h"

#include <span>

#include "base/error.h"

namespace plumb {

ChatTokenizer chat_tokenizer(const Tokenizer& tokenizer) {
  ChatTokenizer t;
  t.encode_text = [tokenizer](std::string_view text) { return tokenizer.encode(text, false); };
  t.token_to_id = [tokenizer](std::string_view token) { return tokenizer.token_to_id(token); };
  t.id_to_bytes = [tokenizer](int32_t id) { return tokenizer.id_to_bytes(id); };
  return t;
}

namespace {

// Neighbouring stretches of ordinary text are one text for the tokenizer, so that the tokens are those of the released
// encoder even where an assistant turn has no header. A token across the border is not a target.
void append_text(ChatTokens& out, std::span<const ChatPiece> pieces, const ChatTokenizer& tokenizer) {
  std::string text;
  std::vector<uint8_t> target;  // of each byte
  for (const ChatPiece& piece : pieces) {
    text += piece.text;
    target.resize(text.size(), piece.target);
  }
  size_t at = 0;
  for (int32_t id : tokenizer.encode_text(text)) {
    size_t end = at + tokenizer.id_to_bytes(id).size();
    PLUMB_CHECK(at < end && end <= text.size(), "the tokens of a text do not spell it");
    out.ids.push_back(id);
    out.mask.push_back(target[at] && target[end - 1]);
    at = end;
  }
}

}  // namespace

ChatTokens encode_pieces(const std::vector<ChatPiece>& pieces, const ChatTokenizer& tokenizer) {
  ChatTokens out;
  for (size_t i = 0; i < pieces.size();) {
    if (pieces[i].control) {
      const ChatPiece& token = pieces[i++];
      std::optional<int32_t> id = tokenizer.token_to_id(token.text);
      if (!id)
        fail("tokenizer", "the vocabulary has no token " + token.text, "use the tokenizer.json of a DeepSeek-V4 model");
      out.ids.push_back(*id);
      out.mask.push_back(token.target);
      continue;
    }
    size_t end = i;
    while (end < pieces.size() && !pieces[end].control) ++end;
    append_text(out, std::span(pieces).subspan(i, end - i), tokenizer);
    i = end;
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
