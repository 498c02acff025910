#include "ops/head_divergence.h"

#include <cmath>

#include "base/parallel.h"
#include "ops/gpu/dispatch.h"
#include "ops/head_chunks.h"

namespace plumb::ops {
namespace {

void check_pair(const HeadRows& student, const HeadRows& teacher) {
  if (student.hidden.space() != teacher.hidden.space())
    fail("head divergence",
         std::string("the student is in memory of the ") + space_name(student.hidden.space()) +
             ", the teacher of the " + space_name(teacher.hidden.space()),
         "give both models the same kernels");
  check_hidden(student.hidden, student.head);
  check_hidden(teacher.hidden, teacher.head);
  if (student.hidden.size(0) != teacher.hidden.size(0))
    fail("head divergence", std::to_string(student.hidden.size(0)) + " rows of the student, " +
                                std::to_string(teacher.hidden.size(0)) + " of the teacher");
  if (student.head.out != teacher.head.out)
    fail("head divergence",
         "the student's vocabulary has " + std::to_string(student.head.out) + " tokens, the teacher's " +
             std::to_string(teacher.head.out),
         "distillation compares probabilities token by token: take a teacher with the same vocabulary");
}

// One row of both models.
class PairRow {
 public:
  PairRow(const float* student, const float* teacher, int64_t vocab)
      : student_(student),
        teacher_(teacher),
        vocab_(vocab),
        s_(softmax_sum(student, vocab)),
        t_(softmax_sum(teacher, vocab)) {
    shift_ = static_cast<float>(double{s_.highest} - t_.highest + std::log(s_.sum) - std::log(t_.sum));
  }

  double divergence(Divergence kind) const {
    const bool reverse = kind == Divergence::reverse_kl;
    const float* logits = reverse ? student_ : teacher_;
    const SoftmaxSum& sum = reverse ? s_ : t_;
    WideSum total;
    for_lanes(vocab_, [&](int64_t v, int64_t n) {
      total.add(exp(load_logits(logits + v, n) - splat(sum.highest)) * log_ratio(v, n));
    });
    return (reverse ? 1 : -1) * total.total() / sum.sum;
  }

  // d times the gradient with respect to the student's logits, which it may overwrite: p (log p - log q - KL), or p -
  // q.
  void gradient(Divergence kind, double value, float d, float* out) const {
    const Lanes own = splat(static_cast<float>(d / s_.sum)), other = splat(static_cast<float>(d / t_.sum));
    const Lanes mean = splat(static_cast<float>(value));
    for_lanes(vocab_, [&](int64_t v, int64_t n) {
      const Lanes p = exp(load_part(student_ + v, n) - splat(s_.highest)) * own;
      const Lanes q = exp(load_part(teacher_ + v, n) - splat(t_.highest)) * other;
      store_part(out + v, kind == Divergence::reverse_kl ? p * (log_ratio(v, n) - mean) : p - q, n);
    });
  }

 private:
  // log p - log q; something finite in the lanes behind the n-th.
  Lanes log_ratio(int64_t v, int64_t n) const {
    return load_part(student_ + v, n) - load_part(teacher_ + v, n) - splat(shift_);
  }
  const float *student_, *teacher_;
  int64_t vocab_;
  SoftmaxSum s_, t_;
  float shift_;  // of the logits' difference: that of the logarithms of both normalisers
};

// body(row, PairRow, the student's logits of the row), then after(first row, the student's logits) for each chunk.
template <class Body, class After>
void for_pairs(const HeadRows& student, const HeadRows& teacher, Body&& body, After&& after) {
  const int64_t vocab = student.head.out, d = teacher.head.in;
  const Tensor buffer = Tensor::empty({std::min(student.hidden.size(0), chunk_rows(vocab)), vocab});
  for_chunks(student.hidden, student.head, [&](int64_t first, const Tensor& logits) {
    linear_into(teacher.hidden.f32() + first * d, d, logits.size(0), teacher.head, buffer.f32(), vocab);
    parallel_for(logits.size(0), 1, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        float* row = logits.f32() + r * vocab;
        body(first + r, PairRow(row, buffer.f32() + r * vocab, vocab), row);
      }
    });
    after(first, logits);
  });
}

}  // namespace

Tensor head_divergence(Divergence kind, const HeadRows& student, const HeadRows& teacher) {
  check_pair(student, teacher);
  PLUMB_ON_GPU(student.hidden, head_divergence(kind, student, teacher));
  Tensor result = Tensor::empty({student.hidden.size(0)});
  for_pairs(
      student, teacher,
      [&](int64_t r, const PairRow& pair, float*) { result.f32()[r] = static_cast<float>(pair.divergence(kind)); },
      [](int64_t, const Tensor&) {});
  return result;
}

Tensor head_divergence_backward(Divergence kind, const Tensor& d_divergence, const HeadRows& student,
                                const HeadRows& teacher, const Tensor& d_head, Tensor* divergence) {
  check_pair(student, teacher);
  PLUMB_ON_GPU(student.hidden, head_divergence_backward(kind, d_divergence, student, teacher, d_head, divergence));
  const Linear& head = student.head;
  Tensor d_hidden = Tensor::empty(student.hidden.shape());
  if (divergence) *divergence = Tensor::empty({student.hidden.size(0)});
  for_pairs(
      student, teacher,
      [&](int64_t r, const PairRow& pair, float* logits) {
        const double value = pair.divergence(kind);
        if (divergence) divergence->f32()[r] = static_cast<float>(value);
        pair.gradient(kind, value, d_divergence.f32()[r], logits);
      },
      [&](int64_t first, const Tensor& d_logits) {
        const int64_t n = d_logits.size(0);
        linear_backward_input(d_logits.f32(), head.out, n, head, d_hidden.f32() + first * head.in, head.in, false);
        // Chunks continue the chains over rows: the gradient does not depend on their size.
        if (d_head.defined())
          linear_backward_weight(d_logits.f32(), head.out, student.hidden.f32() + first * head.in, head.in, n, d_head);
      });
  return d_hidden;
}

}  // namespace plumb::ops
