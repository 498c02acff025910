#include "ops/rows.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/error.h"
#include "base/float_formats.h"
#include "base/parallel.h"
#include "ops/elementwise.h"
#include "ops/gpu/dispatch.h"

namespace plumb::ops {
namespace {

// body(i) for every row, on all threads.
template <class Body>
void for_rows(int64_t rows, int64_t width, Body&& body) {
  parallel_for(rows, std::max<int64_t>(1, 65536 / std::max<int64_t>(1, width)), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(i);
  });
}

}  // namespace

Tensor embed(const Linear& table, const Tensor& token, int64_t copies) {
  PLUMB_ON_GPU(token, embed(table, token, copies));
  PLUMB_CHECK(table.format == WeightFormat::f32 || table.format == WeightFormat::bf16);
  const int64_t d = table.in, rows = token.numel();
  const int32_t* id = token.ptr<int32_t>();
  for (int64_t r = 0; r < rows; ++r) PLUMB_CHECK(0 <= id[r] && id[r] < table.out, "token " + std::to_string(id[r]));
  Tensor x = Tensor::empty({rows, copies, d});
  for_rows(rows, copies * d, [&](int64_t r) {
    float* to = x.f32() + r * copies * d;
    if (table.format == WeightFormat::f32) {
      std::copy_n(table.data.f32() + id[r] * d, d, to);
    } else {
      const uint16_t* from = table.data.ptr<uint16_t>() + id[r] * d;
      for (int64_t i = 0; i < d; ++i) to[i] = bf16_to_float(from[i]);
    }
    for (int64_t c = 1; c < copies; ++c) std::copy_n(to, d, to + c * d);
  });
  return x;
}

void embed_backward(const Tensor& dx, const Tensor& token, const Tensor& d_table) {
  const Tensor sum = sum_copies(dx);
  for (int64_t r = 0; r < sum.size(0); ++r)
    add(sum.f32() + r * sum.size(1), sum.size(1), d_table.f32() + token.ptr<int32_t>()[r] * sum.size(1));
}

Tensor gather_rows(const Tensor& x, const Tensor& row) {
  PLUMB_ON_GPU(x, gather_rows(x, row));
  Shape shape = x.shape();
  shape[0] = row.numel();
  Tensor y = Tensor::empty(shape, x.dtype());
  const size_t bytes = x.row_size() * dtype_size(x.dtype());
  for_rows(row.numel(), x.row_size(),
           [&](int64_t i) { std::memcpy(y.raw() + i * bytes, x.raw() + row.ptr<int32_t>()[i] * bytes, bytes); });
  return y;
}

Tensor gather_rows(const Tensor& x, const std::vector<int>& row) {
  const Tensor numbers = Tensor::of(row);
  return gather_rows(x, x.on_device() ? to_device(numbers) : numbers);
}

void scatter_add_rows(const Tensor& dy, const Tensor& row, const Tensor& into) {
  PLUMB_ON_GPU(dy, scatter_add_rows(dy, row, into));
  const int64_t width = into.row_size();
  for (int64_t i = 0; i < row.numel(); ++i)
    add(dy.f32() + i * width, width, into.f32() + row.ptr<int32_t>()[i] * width);
}

void copy_rows(const Tensor& from, const RowCopy& copy, const Tensor& to) {
  PLUMB_ON_GPU(from, copy_rows(from, copy, to));
  const int64_t count = copy.row.defined() ? copy.row.numel() : copy.slot.defined() ? copy.slot.numel() : from.size(0);
  if (count == 0) return;
  PLUMB_CHECK(from.row_size() == to.row_size() && from.dtype() == to.dtype());
  const size_t bytes = from.row_size() * dtype_size(from.dtype());
  for (int64_t i = 0; i < count; ++i) {
    const int64_t source = copy.row.defined() ? copy.row.ptr<int32_t>()[i] : i;
    const int64_t slot = copy.slot.defined() ? copy.slot.ptr<int32_t>()[i] : i, at = copy.offset + slot;
    if (source == -1 || slot == -1) continue;
    PLUMB_CHECK(0 <= source && source < from.size(0) && 0 <= at && at < to.size(0));
    std::memcpy(to.raw() + at * bytes, from.raw() + source * bytes, bytes);
  }
}

Tensor sum_copies(const Tensor& x) {
  const int64_t rows = x.size(0), copies = x.size(1), d = x.size(2);
  if (copies == 1) return x.view({rows, d});
  Tensor sum = Tensor::zeros({rows, d});
  for_rows(rows, copies * d, [&](int64_t r) {
    for (int64_t c = 0; c < copies; ++c) add(x.f32() + (r * copies + c) * d, d, sum.f32() + r * d);
  });
  return sum;
}

Tensor add_to_copies(const Tensor& e, const Tensor& x, const RoundAt& at) {
  Tensor y = x.clone();
  const int64_t copies = x.size(1), d = x.size(2);
  for_rows(x.size(0) * copies, d, [&](int64_t i) { add(e.f32() + i / copies * d, d, y.f32() + i * d); });
  round_point(at, y);
  return y;
}

}  // namespace plumb::ops
