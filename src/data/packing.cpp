#include "data/packing.h"

#include <numeric>
#include <set>
#include <utility>

#include "base/error.h"
#include "base/hash.h"
#include "base/philox.h"

namespace plumb {
namespace {

template <class T>
void shuffle(std::vector<T>& list, Random& random) {  // Fisher-Yates
  for (size_t i = list.size(); i > 1; --i) std::swap(list[i - 1], list[random.below(static_cast<uint32_t>(i))]);
}

}  // namespace

std::vector<Row> pack_epoch(const std::vector<int>& lengths, int row_tokens, uint64_t seed, int64_t epoch) {
  Random random(seed, mix_bits(hash_text("packing") + static_cast<uint64_t>(epoch)));
  std::vector<int> order(lengths.size());
  std::iota(order.begin(), order.end(), 0);
  shuffle(order, random);

  std::vector<Row> rows;
  std::set<std::pair<int, size_t>> open;  // tokens left, row
  for (int sample : order) {
    const int length = lengths[sample];
    PLUMB_CHECK(1 <= length && length <= row_tokens, std::to_string(length));
    auto best = open.lower_bound({length, 0});
    std::pair<int, size_t> place{row_tokens, rows.size()};
    if (best == open.end()) {
      rows.emplace_back();
    } else {
      place = *best;
      open.erase(best);
    }
    rows[place.second].push_back(sample);
    if (place.first > length) open.insert({place.first - length, place.second});
  }
  shuffle(rows, random);  // rows that were opened last are the emptiest
  return rows;
}

RowStream::RowStream(std::vector<int> lengths, int row_tokens, uint64_t seed)
    : lengths_(std::move(lengths)), row_tokens_(row_tokens), seed_(seed) {
  PLUMB_CHECK(!lengths_.empty());
  seek({});
}

Row RowStream::next() {
  if (cursor_.row == static_cast<int64_t>(rows_.size())) seek({cursor_.epoch + 1, 0});
  return rows_[cursor_.row++];
}

void RowStream::seek(const DataCursor& cursor) {
  if (rows_.empty() || cursor.epoch != cursor_.epoch) rows_ = pack_epoch(lengths_, row_tokens_, seed_, cursor.epoch);
  PLUMB_CHECK(0 <= cursor.row && cursor.row <= static_cast<int64_t>(rows_.size()), std::to_string(cursor.row));
  cursor_ = cursor;
}

int64_t RowStream::rows_in(int64_t epochs) const {
  int64_t rows = 0;
  for (int64_t epoch = 0; epoch < epochs; ++epoch)
    rows += static_cast<int64_t>(pack_epoch(lengths_, row_tokens_, seed_, epoch).size());
  return rows;
}

}  // namespace plumb
