// AdamW and the gradient norm against plain loops in FP64 on the CPU. Tests named Small* also run under
// compute-sanitizer.
#include "kernels/optimizer/optimizer.h"

#include <gtest/gtest.h>

#include <memory>

#include "device_data.cuh"

namespace plumb::kernels::optimizer {
namespace {

struct Parameter {
  Buffer<float> weight, gradient, first, second;
  Parameter(size_t count, int seed)
      : weight(random_floats(count, 0.1f, seed)),
        gradient(random_floats(count, 1e-3f, seed + 1)),
        first(std::vector<float>(count, 0.0f)),
        second(std::vector<float>(count, 0.0f)) {}
  Tensor get() const {
    return {weight.get(), gradient.get(), first.get(), second.get(), static_cast<int64_t>(weight.size())};
  }
};

TEST(Optimizer, SmallBitsOfPlainLoops) {
  const std::vector<size_t> counts = {1, 7, 4096, 4097, 30000, 8};
  std::vector<std::unique_ptr<Parameter>> parameters;
  std::vector<Tensor> tensors;
  for (size_t i = 0; i < counts.size(); ++i) {
    parameters.push_back(std::make_unique<Parameter>(counts[i], static_cast<int>(10 * i)));
    tensors.push_back(parameters.back()->get());
  }
  const auto pieces = pieces_of(tensors);
  const int count = static_cast<int>(pieces.size());
  const Buffer<Tensor> table(pieces);
  Buffer<double> workspace(count), norm(1);
  std::vector<std::vector<float>> w, m, v;
  for (const auto& p : parameters)
    w.push_back(p->weight.host()), m.push_back(p->first.host()), v.push_back(p->second.host());
  for (int step = 1; step <= 3; ++step) {
    AdamW o;
    o.weight_decay = 0.01, o.learning_rate = 1e-3, o.gradient_scale = 0.125, o.step = step;
    o.largest_norm = step == 2 ? 1e-3 : 10;  // clips once
    double squares = 0;
    std::vector<std::vector<float>> g;
    for (size_t i = 0; i < counts.size(); ++i) {
      parameters[i]->gradient.set(random_floats(counts[i], 1e-3f, 100 * step + static_cast<int>(i)));
      g.push_back(parameters[i]->gradient.host());
      for (const float x : g.back()) squares += double{x} * x;
    }
    gradient_norm(table.get(), count, o.gradient_scale, workspace.get(), norm.get(), nullptr);
    const double measured = norm.host()[0];
    EXPECT_NEAR(measured, std::sqrt(squares) * o.gradient_scale, 1e-12 * measured);  // another order of FP64 sums
    adamw(table.get(), count, o, norm.get(), step != 3, nullptr);

    double scale = o.gradient_scale;
    if (measured > o.largest_norm) scale *= o.largest_norm / measured;
    const double correct1 = 1 / (1 - std::pow(o.beta1, step)), correct2 = 1 / (1 - std::pow(o.beta2, step));
    const double keep = 1 - o.learning_rate * o.weight_decay;
    for (size_t i = 0; i < counts.size(); ++i) {
      for (size_t j = 0; j < counts[i]; ++j) {  // volatile: no contraction into fused operations
        const volatile double gradient = scale * g[i][j];
        const volatile double m0 = o.beta1 * m[i][j], m1 = (1 - o.beta1) * gradient, v0 = o.beta2 * v[i][j];
        const volatile double v1 = (1 - o.beta2) * gradient, v2 = v1 * gradient;
        const volatile double first = m0 + m1, second = v0 + v2;
        m[i][j] = static_cast<float>(first), v[i][j] = static_cast<float>(second);
        const volatile double corrected = first * correct1, inside = second * correct2;
        const volatile double move = o.learning_rate * corrected / (std::sqrt(inside) + o.eps), kept = w[i][j] * keep;
        w[i][j] = static_cast<float>(kept - move);
      }
      ASSERT_EQ(differences(parameters[i]->weight.host(), w[i]), 0u) << "step " << step << " tensor " << i;
      ASSERT_EQ(differences(parameters[i]->first.host(), m[i]), 0u);
      ASSERT_EQ(differences(parameters[i]->second.host(), v[i]), 0u);
      if (step != 3) {
        ASSERT_EQ(differences(parameters[i]->gradient.host(), std::vector<float>(counts[i], 0.0f)), 0u);
      }
    }
  }
}

TEST(Optimizer, NormRepeats) {
  Parameter p(3'000'001, 1);
  const auto pieces = pieces_of({p.get()});
  const Buffer<Tensor> table(pieces);
  Buffer<double> workspace(pieces.size()), norm(1);
  std::vector<double> first;
  for (int i = 0; i < 50; ++i) {
    gradient_norm(table.get(), static_cast<int>(pieces.size()), 1, workspace.get(), norm.get(), nullptr);
    if (i == 0) first = norm.host();
    ASSERT_EQ(norm.host(), first);
  }
}

}  // namespace
}  // namespace plumb::kernels::optimizer
