// Text to token ids and back, as a Hugging Face tokenizer.json says (byte-level BPE, docs/tokenizer.md).
#pragma once
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace plumb {

// Immutable and cheap to copy (copies share one vocabulary); every member may be called from any number of threads.
class Tokenizer {
 public:
  // Reads a tokenizer.json. Error: the file cannot be read, or it asks for something that is not implemented (the key
  // is named), because ignoring it would give other ids than the model was trained with.
  static Tokenizer load(const std::filesystem::path& file);
  // The same from memory; `name` stands for the file in errors.
  static Tokenizer parse(std::string_view json, const std::string& name);

  // with_added_tokens = true: the added vocabulary is looked for first, so "<think>" in the text becomes its control
  // token (what Hugging Face's encode(add_special_tokens=False) gives). false: all of it is ordinary text; use it for
  // whatever a user or a tool wrote. Nothing is put in front or behind (no BOS). Error: `text` is not UTF-8 (the byte
  // offset is named).
  std::vector<int32_t> encode(std::string_view text, bool with_added_tokens) const;

  // The text of the ids, special tokens (the flag of the file, see is_special) left out if skip_special. Bytes that are
  // not UTF-8 become U+FFFD, one for each maximal part of a character. Ids without a token have no text.
  std::string decode(const std::vector<int32_t>& ids, bool skip_special) const;

  // Spelling in the file: byte alphabet ("\u0120the" for " the") for BPE entries, plain text for added tokens.
  std::optional<int32_t> token_to_id(std::string_view token) const;
  const std::string& id_to_token(int32_t id) const;  // Error: no token has this id.
  // The bytes that the token adds to a text; a token may hold part of a character. Empty for ids without a token.
  const std::string& id_to_bytes(int32_t id) const;

  // Largest id + 1: the rows that an embedding needs. Ids without a token are possible below it.
  int32_t vocab_size() const;
  // Whether the file lists the token as added, and whether with the flag `special`. In the V4 vocabulary chat tokens
  // such as <think> are added but not special: skip_special does not remove them.
  bool is_added(int32_t id) const;
  bool is_special(int32_t id) const;

 private:
  struct State;
  explicit Tokenizer(std::shared_ptr<const State> state);
  std::shared_ptr<const State> state_;
};

// decode() for a stream of ids: returns text as soon as it is certain and never part of a character. The pieces joined
// are exactly what decode() gives for all ids.
class StreamDecoder {
 public:
  StreamDecoder(Tokenizer tokenizer, bool skip_special);
  std::string push(int32_t id);
  // The rest: U+FFFD if the stream ended inside a character. The decoder is then ready for another stream.
  std::string finish();

 private:
  Tokenizer tokenizer_;
  bool skip_special_;
  std::string pending_;  // a character whose last bytes have not come yet
};

}  // namespace plumb
