// Divergences over the vocabulary and their gradients against FP64 on the CPU.
#include "kernels/head/divergence.h"

#include "device_data.cuh"

namespace plumb::kernels::head {
namespace {

using Logits = std::vector<double>;

struct Side {
  int width;
  Buffer<uint16_t> hidden, matrix;
  Model model;
  Side(int rows, int vocabulary, int width_, int seed)
      : width(width_),
        hidden(random_bf16(static_cast<size_t>(rows) * width, 1, seed)),
        matrix(
            random_bf16(static_cast<size_t>(vocabulary) * width, 3 / std::sqrt(static_cast<float>(width)), seed + 1)),
        model{hidden.get(), {matrix.get(), vocabulary, width}} {}
  Logits logits(int rows) const {
    return reference_product<uint16_t, uint16_t>({hidden.get(), width, 1}, {matrix.get(), width, 1}, rows,
                                                 model.weight.vocabulary, width)
        .sum;
  }
};

void make_log_probabilities(double* logits, int vocabulary) {
  const double top = *std::max_element(logits, logits + vocabulary);
  double sum = 0;
  for (int v = 0; v < vocabulary; ++v) sum += std::exp(logits[v] - top);
  for (int v = 0; v < vocabulary; ++v) logits[v] -= top + std::log(sum);
}

struct Result {
  std::vector<float> value, d_hidden;
};
Result compute(Divergence kind, const Model& student, const Model& teacher, int rows, int chunk,
               const std::vector<float>& d) {
  const int vocabulary = student.weight.vocabulary, width = student.weight.width;
  Buffer<float> value(rows), d_value(d), d_hidden(static_cast<size_t>(rows) * width);
  Buffer<uint8_t> workspace(divergence_workspace_bytes(std::min(rows, chunk), vocabulary));
  divergence(kind, student, teacher, rows, chunk, value.get(), d_value.get(), d_hidden.get(), workspace.get(), nullptr);
  const Result r{value.host(), d_hidden.host()};
  divergence(kind, student, teacher, rows, chunk, value.get(), nullptr, nullptr, workspace.get(), nullptr);
  EXPECT_TRUE(same_bits(value.host(), r.value));
  return r;
}

void compare(Divergence kind, int rows, int vocabulary, int width, int teacher_width, int chunk) {
  const Side student(rows, vocabulary, width, 1), teacher(rows, vocabulary, teacher_width, 5);
  const std::vector<float> d = random_floats(rows, 1, 9);
  const Result got = compute(kind, student.model, teacher.model, rows, chunk, d);
  Logits p = student.logits(rows), q = teacher.logits(rows);
  const auto w = student.matrix.host();
  std::vector<double> d_hidden(got.d_hidden.size());
  for (int r = 0; r < rows; ++r) {
    double *a = &p[static_cast<size_t>(r) * vocabulary], *b = &q[static_cast<size_t>(r) * vocabulary], want = 0;
    make_log_probabilities(a, vocabulary), make_log_probabilities(b, vocabulary);
    const bool reverse = kind == Divergence::reverse_kl;
    for (int v = 0; v < vocabulary; ++v)
      want += reverse ? std::exp(a[v]) * (a[v] - b[v]) : std::exp(b[v]) * (b[v] - a[v]);
    ASSERT_NEAR(got.value[r], want, 1e-4 + 1e-5 * want) << r;  // log-probabilities to 3e-5 (docs/kernels/head.md)
    for (int v = 0; v < vocabulary; ++v) {
      const double slope = d[r] * (reverse ? std::exp(a[v]) * (a[v] - b[v] - want) : std::exp(a[v]) - std::exp(b[v]));
      for (int i = 0; i < width; ++i)
        d_hidden[static_cast<size_t>(r) * width + i] += slope * value(w[static_cast<size_t>(v) * width + i]);
    }
  }
  EXPECT_LT(relative_error(got.d_hidden, d_hidden), 4e-3);  // gradients of logits are rounded to bf16
}
TEST(HeadDivergence, Small) {
  for (const Divergence kind : {Divergence::reverse_kl, Divergence::forward_kl}) {
    compare(kind, 5, 1000, 64, 128, 8);
    compare(kind, 70, 648, 128, 64, 32);
  }
}
TEST(HeadDivergence, ARowDependsOnItselfAlone) {
  const int rows = 150, vocabulary = 4104, width = 256;
  const Side student(rows, vocabulary, width, 1), teacher(rows, vocabulary, width, 5);
  const std::vector<float> d = random_floats(rows, 1, 9);
  for (const Divergence kind : {Divergence::reverse_kl, Divergence::forward_kl}) {
    const Result all = compute(kind, student.model, teacher.model, rows, 1024, d),
                 chunked = compute(kind, student.model, teacher.model, rows, 40, d);
    EXPECT_TRUE(same_bits(all.value, chunked.value));
    EXPECT_TRUE(same_bits(all.d_hidden, chunked.d_hidden));
    Model one = student.model, other = teacher.model;
    one.hidden += 77 * width, other.hidden += 77 * width;
    const Result alone = compute(kind, one, other, 1, 8, {d[77]});
    EXPECT_EQ(alone.value[0], all.value[77]);
    EXPECT_EQ(0, std::memcmp(alone.d_hidden.data(), &all.d_hidden[77 * width], width * 4));
  }
}
TEST(HeadDivergence, ExactlyZeroFromItselfSmall) {
  const int rows = 20, vocabulary = 1000, width = 64;
  const Side student(rows, vocabulary, width, 1);
  for (const Divergence kind : {Divergence::reverse_kl, Divergence::forward_kl}) {
    const Result r = compute(kind, student.model, student.model, rows, 32, std::vector<float>(rows, 1));
    for (const float v : r.value) EXPECT_EQ(v, 0);
    for (const float v : r.d_hidden) EXPECT_EQ(v, 0);
  }
}

}  // namespace
}  // namespace plumb::kernels::head
