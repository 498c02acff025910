#include "tokenizer/bpe.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <mutex>
#include <queue>

namespace plumb {
namespace {

// Up to here a scan over all pairs for each merge is quicker than a heap.
constexpr size_t scan_limit = 48;

void merge_by_scan(const MergeTable& merges, std::vector<int32_t>& ids, size_t begin) {
  const size_t n = ids.size() - begin;
  int32_t* id = ids.data() + begin;
  const MergeTable::Entry* pair[scan_limit];  // of id[i] and id[i + 1]
  size_t count = n;
  for (size_t i = 0; i + 1 < n; ++i) pair[i] = merges.find(id[i], id[i + 1]);
  for (;;) {
    size_t best = count;
    int32_t best_rank = MergeTable::no_rank;
    for (size_t i = 0; i + 1 < count; ++i) {
      if (pair[i] && pair[i]->rank < best_rank) best = i, best_rank = pair[i]->rank;
    }
    if (best == count) break;
    id[best] = pair[best]->result;
    std::copy(id + best + 2, id + count, id + best + 1);
    if (best + 2 < count) std::copy(pair + best + 2, pair + count - 1, pair + best + 1);
    --count;
    if (best > 0) pair[best - 1] = merges.find(id[best - 1], id[best]);
    if (best + 1 < count) pair[best] = merges.find(id[best], id[best + 1]);
  }
  ids.resize(begin + count);
}

// The tokens form a doubly linked list; a heap holds every pair that merges. A merge changes the pairs beside it, so an
// entry may be out of date when it comes up: it then no longer matches the list.
void merge_by_heap(const MergeTable& merges, std::vector<int32_t>& ids, size_t begin) {
  struct Node {
    int32_t id, previous, next;  // id -1: merged into the node before
  };
  struct Candidate {
    int32_t rank, at, left, right, result;
    bool operator<(const Candidate& other) const {  // the queue gives the largest first
      return rank != other.rank ? rank > other.rank : at > other.at;
    }
  };
  const auto n = static_cast<int32_t>(ids.size() - begin);
  std::vector<Node> nodes(n);
  for (int32_t i = 0; i < n; ++i) nodes[i] = {ids[begin + i], i - 1, i + 1 < n ? i + 1 : -1};
  std::priority_queue<Candidate> queue;
  const auto consider = [&](int32_t at) {
    if (at < 0 || nodes[at].next < 0) return;
    const int32_t left = nodes[at].id, right = nodes[nodes[at].next].id;
    if (const auto* entry = merges.find(left, right)) queue.push({entry->rank, at, left, right, entry->result});
  };
  for (int32_t i = 0; i < n; ++i) consider(i);
  while (!queue.empty()) {
    const Candidate top = queue.top();
    queue.pop();
    Node& node = nodes[top.at];
    if (node.id != top.left || node.next < 0 || nodes[node.next].id != top.right) continue;
    Node& gone = nodes[node.next];
    node.id = top.result;
    node.next = gone.next;
    gone.id = -1;
    if (node.next >= 0) nodes[node.next].previous = top.at;
    consider(node.previous);
    consider(top.at);
  }
  ids.resize(begin);
  for (int32_t i = 0; i >= 0; i = nodes[i].next) ids.push_back(nodes[i].id);
}

}  // namespace

MergeTable::MergeTable(const std::vector<Merge>& by_rank) {
  const size_t slots = std::bit_ceil(2 * by_rank.size() + 2);
  shift_ = 64 - std::countr_zero(slots);
  entries_.resize(slots);
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    const Merge& m = by_rank[rank];
    entries_[slot_of(m.left, m.right)] = {m.left, m.right, static_cast<int32_t>(rank), m.result};
  }
}

size_t MergeTable::slot_of(int32_t left, int32_t right) const {
  const uint64_t key = static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
  size_t slot = (key * 0x9e3779b97f4a7c15u) >> shift_;  // Fibonacci hashing: the top bits are the well mixed ones
  while (entries_[slot].left >= 0 && (entries_[slot].left != left || entries_[slot].right != right))
    slot = (slot + 1) & (entries_.size() - 1);
  return slot;
}

void encode_word(const BpeModel& model, std::string_view word, std::vector<int32_t>& ids) {
  if (!model.whole_words.empty()) {
    const auto whole = model.whole_words.find(std::string(word));
    if (whole != model.whole_words.end()) return ids.push_back(whole->second);
  }
  const size_t begin = ids.size();
  for (const char c : word) ids.push_back(model.byte_token[static_cast<unsigned char>(c)]);
  if (word.size() <= scan_limit) {
    merge_by_scan(model.merges, ids, begin);
  } else {
    merge_by_heap(model.merges, ids, begin);
  }
}

struct WordCache::Storage {
  static constexpr size_t slot_count = 1 << 16, lock_count = 64;
  struct Slot {
    std::array<int32_t, 8> ids;
    std::array<char, 30> word;
    uint8_t word_size = 0, id_count = 0;
  };
  std::vector<Slot> slots{slot_count};
  std::array<std::mutex, lock_count> locks;  // one for every lock_count-th slot
};

WordCache::WordCache() : storage_(std::make_unique<Storage>()) {}
WordCache::~WordCache() = default;

void WordCache::encode(const BpeModel& model, std::string_view word, std::vector<int32_t>& ids) {
  if (word.empty() || word.size() > Storage::Slot{}.word.size()) return encode_word(model, word, ids);
  const size_t index = std::hash<std::string_view>{}(word) % Storage::slot_count;
  Storage::Slot& slot = storage_->slots[index];
  std::mutex& mutex = storage_->locks[index % Storage::lock_count];
  {
    const std::lock_guard lock(mutex);
    if (slot.word_size == word.size() && std::memcmp(slot.word.data(), word.data(), word.size()) == 0) {
      ids.insert(ids.end(), slot.ids.begin(), slot.ids.begin() + slot.id_count);
      return;
    }
  }
  const size_t begin = ids.size();
  encode_word(model, word, ids);
  const size_t count = ids.size() - begin;
  if (count > slot.ids.size()) return;
  const std::lock_guard lock(mutex);
  slot.word_size = static_cast<uint8_t>(word.size());
  slot.id_count = static_cast<uint8_t>(count);
  std::copy(word.begin(), word.end(), slot.word.begin());
  std::copy(ids.begin() + begin, ids.end(), slot.ids.begin());
}

}  // namespace plumb
