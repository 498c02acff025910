// The BPE model: bytes of one word (pre-token) to token ids. Sennrich et al. 2016, over bytes as in GPT-2.
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace plumb {

struct Merge {
  int32_t left, right, result;  // ids; the position in a list of merges is the rank, low ranks are applied first
};

// (left, right) -> (rank, result). Open addressing over one array, at most half full.
class MergeTable {
 public:
  static constexpr int32_t no_rank = INT32_MAX;
  struct Entry {
    int32_t left = -1, right = -1, rank = no_rank, result = -1;
  };

  MergeTable() : MergeTable(std::vector<Merge>{}) {}
  explicit MergeTable(const std::vector<Merge>& by_rank);  // of equal pairs the last counts, as in Hugging Face
  const Entry* find(int32_t left, int32_t right) const {   // null if the pair does not merge
    const Entry& entry = entries_[slot_of(left, right)];
    return entry.left < 0 ? nullptr : &entry;
  }

 private:
  size_t slot_of(int32_t left, int32_t right) const;  // where the pair is, or the free slot where it would be
  std::vector<Entry> entries_;
  int shift_ = 0;
};

struct BpeModel {
  std::array<int32_t, 256> byte_token;  // id of each single byte
  MergeTable merges;
  // ignore_merges: a word that is a token as a whole is that token, even if no merges lead to it. Else empty.
  std::unordered_map<std::string, int32_t> whole_words;
};

// Appends the tokens of `word`: from single bytes, the pair of lowest rank (leftmost of equals) is merged until none is
// left. O(n log n) time for long words.
void encode_word(const BpeModel& model, std::string_view word, std::vector<int32_t>& ids);

// Tokens of short words seen before. A fixed number of slots, a new word takes the slot of an old one, so memory is
// bounded (4 MB). Any number of threads may use it; what it returns never depends on its contents.
class WordCache {
 public:
  WordCache();
  ~WordCache();
  // encode_word, remembered.
  void encode(const BpeModel& model, std::string_view word, std::vector<int32_t>& ids);

 private:
  struct Storage;
  std::unique_ptr<Storage> storage_;
};

}  // namespace plumb
