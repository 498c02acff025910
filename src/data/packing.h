// Which samples share a row, and in which order the rows come: deterministic, shuffled anew every epoch, and resumable
// from two numbers.
#pragma once
#include <cstdint>
#include <vector>

namespace plumb {

// Samples of one row, by index; their tokens together are at most row_tokens.
using Row = std::vector<int>;

// One epoch: every sample occurs once. The samples are shuffled by (seed, epoch), each then goes into the row that it
// fills best (the earlier one if two are equal), and the rows are shuffled. lengths[i] in 1..row_tokens.
std::vector<Row> pack_epoch(const std::vector<int>& lengths, int row_tokens, uint64_t seed, int64_t epoch);

// Rows of all epochs one after the other, without end.
struct DataCursor {
  int64_t epoch = 0, row = 0;  // the next row
  bool operator==(const DataCursor&) const = default;
};
class RowStream {
 public:
  RowStream(std::vector<int> lengths, int row_tokens, uint64_t seed);
  Row next();
  const DataCursor& cursor() const { return cursor_; }
  // The next row will be the one that came next when cursor() had this value.
  void seek(const DataCursor& cursor);
  // Rows of the epoch that cursor() is in.
  int64_t epoch_rows() const { return static_cast<int64_t>(rows_.size()); }
  // Number of rows of epochs 0 .. epochs-1.
  int64_t rows_in(int64_t epochs) const;

 private:
  std::vector<int> lengths_;
  int row_tokens_;
  uint64_t seed_;
  DataCursor cursor_;
  std::vector<Row> rows_;  // of cursor_.epoch
};

}  // namespace plumb
