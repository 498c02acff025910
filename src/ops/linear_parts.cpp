#include "ops/linear_parts.h"

#include <algorithm>
#include <string>

#include "base/error.h"
#include "base/parallel.h"
#include "ops/matmul.h"

namespace plumb::ops {
namespace {

void check_pair(const LoraPair& p, int64_t in, int64_t out) {
  const int64_t r = p.a.dim() == 2 ? p.a.size(0) : -1;
  if (p.a.shape() != Shape{r, in} || p.b.shape() != Shape{out, r})
    fail("linear", "LoRA a [r," + std::to_string(in) + "] and b [" + std::to_string(out) + ",r] expected, " +
                       to_string(p.a.shape()) + " and " + to_string(p.b.shape()) + " found");
}

// body(i, row of the batch) for the rows of an adapter, on all threads.
template <class Body>
void for_rows(const std::vector<int>& rows, int64_t width, Body&& body) {
  const int64_t grain = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, width));
  parallel_for(static_cast<int64_t>(rows.size()), grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(i, rows[i]);
  });
}

// The rows of a batch that an adapter sees, one after the other: a copy, unless it sees all of them.
class Part {
 public:
  Part(int64_t batch, const std::vector<int>* rows)
      : rows_(rows && static_cast<int64_t>(rows->size()) < batch ? rows : nullptr),
        count_(rows_ ? static_cast<int64_t>(rows_->size()) : batch) {}
  int64_t count() const { return count_; }

  // `copy` holds what the result points to.
  RowsIn of(const RowsIn& x, Tensor& copy) const {
    if (!rows_) return x;
    copy = Tensor::empty({count_, x.width});
    for_rows(*rows_, x.width,
             [&](int64_t i, int64_t row) { std::copy_n(x.data + row * x.ld, x.width, copy.f32() + i * x.width); });
    return {copy.f32(), x.width, x.width};
  }
  // Calls body(rows) with the adapter's rows of y, which it may change.
  template <class Body>
  void change(const RowsOut& y, Body&& body) const {
    if (!rows_) return body(y);
    Tensor copy;
    of({y.data, y.ld, y.width}, copy);
    body(RowsOut{copy.f32(), y.width, y.width});
    for_rows(*rows_, y.width,
             [&](int64_t i, int64_t row) { std::copy_n(copy.f32() + i * y.width, y.width, y.data + row * y.ld); });
  }

 private:
  const std::vector<int>* rows_;
  int64_t count_;
};

// A [rows, r] intermediate. Kept transposed, where there are enough rows for that, so that each product with it has
// many outputs side by side; the chains are the same.
struct LowRank {
  LowRank(int64_t rows, int64_t rank) : rows(rows), rank(rank), transposed(rows > 8) {
    data = Tensor::empty({transposed ? rank : rows, transposed ? rows : rank});
  }
  RowOperand by_row() const { return transposed ? RowOperand{data.f32(), 1, rows} : RowOperand{data.f32(), rank, 1}; }
  RowOperand by_rank() const { return transposed ? RowOperand{data.f32(), rows, 1} : RowOperand{data.f32(), 1, rank}; }
  int64_t rows, rank;
  bool transposed;
  Tensor data;
};

// t (+)= x times `matrix` [r, width] (outputs_are_rows) or [width, r].
void project(const RowsIn& x, const float* matrix, bool outputs_are_rows, LowRank& t, bool accumulate) {
  const int64_t r = t.rank, width = x.width;
  if (t.transposed)
    matmul(r, outputs_are_rows ? RowOperand{matrix, width, 1} : RowOperand{matrix, 1, r},
           panel_of(x.data, x.ld, t.rows, width, true), t.data.f32(), t.rows, accumulate);
  else
    matmul(t.rows, {x.data, x.ld, 1},
           outputs_are_rows ? panel_of(matrix, width, r, width, true) : panel_of(matrix, r, width, r, false),
           t.data.f32(), r, accumulate);
}

void scale(LowRank& t, float factor) {
  float* value = t.data.f32();
  for (int64_t i = 0; i < t.data.numel(); ++i) value[i] *= factor;
}

// u = scale * x A^T
LowRank down_projection(const RowsIn& x, const LoraPair& p, int64_t rows) {
  LowRank u(rows, p.a.size(0));
  project(x, p.a.f32(), true, u, false);
  scale(u, p.scale);
  return u;
}

// db [out, r] += dy^T u, as its transpose: so the outputs lie side by side in dy.
void add_b_gradient(const RowsIn& dy, const LowRank& u, float* db) {
  const int64_t r = u.rank, out = dy.width;
  Tensor turned = Tensor::empty({r, out});
  float* t = turned.f32();
  for (int64_t o = 0; o < out; ++o)
    for (int64_t j = 0; j < r; ++j) t[j * out + o] = db[o * r + j];
  matmul(r, u.by_rank(), panel_of(dy.data, dy.ld, u.rows, out, false), t, out, true);
  for (int64_t o = 0; o < out; ++o)
    for (int64_t j = 0; j < r; ++j) db[o * r + j] = t[j * out + o];
}

template <class Rows>
int64_t total_width(std::initializer_list<Rows> slices) {
  int64_t width = 0;
  for (const Rows& s : slices) width += s.width;
  return width;
}

}  // namespace

Tensor rounded_input(const Tensor& x, const LinearPoints& points) {
  if (point_kind(points.numerics, points.act) == PointKind::keep) return x;
  Tensor rounded = x.clone();
  round_point(points.numerics, points.act, rounded);
  return rounded;
}

void add_lora(int64_t rows, const RowsIn& x, const LoraList& lora, std::initializer_list<RowsOut> ys) {
  for (const LoraRows& l : lora) {
    const LoraPair& p = *l.pair;
    check_pair(p, x.width, total_width(ys));
    const Part part(rows, l.rows);
    Tensor copy;
    const LowRank u = down_projection(part.of(x, copy), p, part.count());
    const float* b = p.b.f32();
    for (const RowsOut& y : ys) {
      part.change(y, [&](const RowsOut& to) {
        matmul(u.rows, u.by_row(), panel_of(b, u.rank, y.width, u.rank, true), to.data, to.ld, true);
      });
      b += y.width * u.rank;
    }
  }
}

void lora_backward(int64_t rows, std::initializer_list<RowsIn> dys, const RowsIn& x, const LoraList& lora,
                   const std::vector<LoraGrad>& grads, const RowsOut& dx) {
  for (size_t i = 0; i < lora.size(); ++i) {
    const LoraPair& p = *lora[i].pair;
    check_pair(p, x.width, total_width(dys));
    const LoraGrad grad = grads.empty() ? LoraGrad{} : grads[i];
    const Part part(rows, lora[i].rows);
    Tensor x_copy;
    const RowsIn own_x = part.of(x, x_copy);
    LowRank du(part.count(), p.a.size(0)), u(0, 0);
    if (grad.b.defined()) u = down_projection(own_x, p, part.count());
    int64_t at = 0;  // row of B
    for (const RowsIn& slice : dys) {
      Tensor copy;
      const RowsIn dy = part.of(slice, copy);
      project(dy, p.b.f32() + at * du.rank, false, du, at > 0);
      if (grad.b.defined()) add_b_gradient(dy, u, grad.b.f32() + at * du.rank);
      at += slice.width;
    }
    scale(du, p.scale);
    part.change(dx, [&](const RowsOut& to) {
      matmul(du.rows, du.by_row(), panel_of(p.a.f32(), x.width, du.rank, x.width, false), to.data, to.ld, true);
    });
    if (grad.a.defined())
      matmul(du.rank, du.by_rank(), panel_of(own_x.data, own_x.ld, du.rows, x.width, false), grad.a.f32(), x.width,
             true);
  }
}

}  // namespace plumb::ops
