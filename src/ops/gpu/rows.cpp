#include "kernels/rows/rows.h"

#include "ops/gpu/gpu_ops.h"
#include "ops/gpu/support.h"

namespace plumb::ops::gpu {
namespace {

namespace rows = kernels::rows;

rows::Term term(const Tensor& x) { return {x.raw(), x.dtype() == DType::bf16, 1}; }

// out = scale * sum of the terms, rounded to the type of `out`. Sizes are multiples of eight.
void sum_into(const std::vector<rows::Term>& terms, float scale, const Tensor& out) {
  constexpr int kWidth = 8;
  PLUMB_CHECK(out.numel() % kWidth == 0 && terms.size() <= rows::kMostTerms, to_string(out.shape()));
  rows::Sum s{};
  for (const rows::Term& t : terms) s.term[s.terms++] = t;
  s.rows = out.numel() / kWidth, s.width = kWidth, s.scale = scale;
  s.out = out.raw(), s.out_bf16 = out.dtype() == DType::bf16;
  rows::sum(s, kStream);
}

}  // namespace

Tensor embed(const Linear& table, const Tensor& token, int64_t copies) {
  const int count = static_cast<int>(token.numel());
  Tensor x = empty({count, copies, table.in}, DType::bf16);
  rows::embed(bf16(table.data), table.out, table.in, i32(token), count, static_cast<int>(copies), bf16(x), kStream);
  return x;
}

Tensor gather_rows(const Tensor& x, const Tensor& row) {
  Shape shape = x.shape();
  shape[0] = row.numel();
  Tensor y = empty_like(x, shape);
  rows::copy(x.raw(), i32(row), y.raw(), nullptr, static_cast<int>(row.numel()), x.row_size() * dtype_size(x.dtype()),
             kStream);
  return y;
}

// Rows that are wanted are wanted once, so each meets nobody but itself.
void scatter_add_rows(const Tensor& dy, const Tensor& row, const Tensor& into) {
  const int count = static_cast<int>(row.numel());
  std::vector<int> one(count + 1), self(count);
  for (int i = 0; i < count; ++i) one[i] = self[i] = i;
  one[count] = count;
  const Tensor begin = upload(one), source = upload(self);
  rows::MeetingSums s{};
  s.x = bf16(dy), s.copies = 1, s.width = static_cast<int>(into.row_size());
  s.to = i32(row), s.begin = i32(begin), s.row = i32(source), s.meetings = count;
  s.out = into.raw(), s.out_bf16 = into.dtype() == DType::bf16, s.add = true;
  rows::add_meetings(s, kStream);
}

void copy_rows(const Tensor& from, const RowCopy& copy, const Tensor& to) {
  const int64_t count = copy.row.defined() ? copy.row.numel() : copy.slot.defined() ? copy.slot.numel() : from.size(0);
  if (count == 0) return;
  PLUMB_CHECK(from.row_size() == to.row_size() && from.dtype() == to.dtype());
  const size_t row_bytes = from.row_size() * dtype_size(from.dtype());
  rows::copy(from.raw(), i32(copy.row), to.rows(copy.offset, to.size(0)).raw(), i32(copy.slot), static_cast<int>(count),
             row_bytes, kStream);
}

void add(const std::vector<Tensor>& terms, const Tensor& into) {
  std::vector<rows::Term> all{term(into)};
  for (const Tensor& x : terms) all.push_back(term(x));
  sum_into(all, 1, into);
}

Tensor scaled(const Tensor& x, float factor) {
  Tensor y = empty(x.shape(), DType::f32);
  sum_into({term(x)}, factor, y);
  return y;
}

Tensor converted(const Tensor& x, DType type) {
  if (x.dtype() == type) return x;
  Tensor y = empty(x.shape(), type);
  sum_into({term(x)}, 1, y);
  return y;
}

}  // namespace plumb::ops::gpu
