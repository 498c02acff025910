#include "train/adamw.h"

#include <cmath>

#include "base/parallel.h"

namespace plumb {

void adamw_step(const Tensor& w, const Tensor& grad, const Tensor& m, const Tensor& v, const AdamWOptions& o, double lr,
                double grad_scale, int64_t step) {
  const double correct1 = 1 / (1 - std::pow(o.beta1, static_cast<double>(step)));
  const double correct2 = 1 / (1 - std::pow(o.beta2, static_cast<double>(step)));
  const double keep = 1 - lr * o.weight_decay;
  float *wp = w.f32(), *mp = m.f32(), *vp = v.f32();
  const float* gp = grad.f32();
  parallel_for(w.numel(), 1 << 13, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const double g = grad_scale * gp[i];
      const double m1 = o.beta1 * mp[i] + (1 - o.beta1) * g;
      const double v1 = o.beta2 * vp[i] + (1 - o.beta2) * g * g;
      mp[i] = static_cast<float>(m1);
      vp[i] = static_cast<float>(v1);
      wp[i] = static_cast<float>(wp[i] * keep - lr * (m1 * correct1) / (std::sqrt(v1 * correct2) + o.eps));
    }
  });
}

}  // namespace plumb
