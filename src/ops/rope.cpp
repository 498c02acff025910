#include "ops/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/error.h"
#include "base/parallel.h"
#include "ops/gpu/dispatch.h"
#include "ops/vector_math.h"

namespace plumb::ops {
namespace {

// The butterflies (a, b) -> (a + b, a - b) of distance half, 2 half, ... n / 2.
void butterflies(float* row, int64_t n, int64_t half) {
  for (; half < n; half *= 2) {
    for (int64_t i = 0; i < n; i += 2 * half) {
      for_lanes(half, [&](int64_t j, int64_t count) {
        float *first = row + i + j, *second = first + half;
        const Lanes a = load_part(first, count), b = load_part(second, count);
        store_part(first, a + b, count);
        store_part(second, a - b, count);
      });
    }
  }
}

// Distances 1, 2 and 4 inside a vector: each lane meets its partner, negated where it is the second of the two.
Lanes butterflies_of_8(Lanes x) {
  const float p = 0.0f, m = -0.0f;  // masks of the sign bit
  x = _mm256_permute_ps(x, 0b10110001) + _mm256_xor_ps(x, _mm256_setr_ps(p, m, p, m, p, m, p, m));
  x = _mm256_permute_ps(x, 0b01001110) + _mm256_xor_ps(x, _mm256_setr_ps(p, p, m, m, p, p, m, m));
  return _mm256_permute2f128_ps(x, x, 1) + _mm256_xor_ps(x, _mm256_setr_ps(p, p, p, p, m, m, m, m));
}

}  // namespace

std::vector<float> rotary_frequencies(int dim, double base, const Yarn* yarn) {
  PLUMB_CHECK(dim >= 0 && dim % 2 == 0);
  std::vector<double> w(dim / 2);
  for (int j = 0; j < dim / 2; ++j) w[j] = std::pow(base, -2.0 * j / dim);
  if (yarn != nullptr && yarn->original_max_position_embeddings > 0) {
    // Pair number at which `rotations` full turns fit into the original length.
    const auto pair_of = [&](double rotations) {
      return dim * std::log(yarn->original_max_position_embeddings / (rotations * 2 * std::numbers::pi)) /
             (2 * std::log(base));
    };
    const double lo = std::max(std::floor(pair_of(yarn->beta_fast)), 0.0);
    const double hi = std::min(std::ceil(pair_of(yarn->beta_slow)), dim - 1.0);
    for (int j = 0; j < dim / 2; ++j) {
      const double ramp = std::clamp((j - lo) / (hi == lo ? 0.001 : hi - lo), 0.0, 1.0);
      w[j] = w[j] / yarn->factor * ramp + w[j] * (1 - ramp);
    }
  }
  return {w.begin(), w.end()};
}

RotaryTable rotary_table(const std::vector<int>& position, const std::vector<float>& freq, Space space) {
#ifdef PLUMB_HAS_CUDA
  if (space == Space::device) return gpu::rotary_table(position, freq);
#endif
  PLUMB_CHECK(space == Space::host);
  RotaryTable t{static_cast<int64_t>(position.size()), static_cast<int64_t>(freq.size()), {}, {}, {}};
  t.cosine.resize(t.rows * t.pairs);
  t.sine.resize(t.rows * t.pairs);
  parallel_for(t.rows, 8, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      for (int64_t j = 0; j < t.pairs; ++j) {
        const float angle = static_cast<float>(position[r]) * freq[j];
        t.cosine[r * t.pairs + j] = static_cast<float>(std::cos(static_cast<double>(angle)));
        t.sine[r * t.pairs + j] = static_cast<float>(std::sin(static_cast<double>(angle)));
      }
  });
  return t;
}

void rotate(float* x, int64_t vectors, int64_t width, const RotaryTable& table, bool inverse) {
  const int64_t pairs = table.pairs;
  PLUMB_CHECK(2 * pairs <= width);
  parallel_for(table.rows, 8, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float *cosine = table.cosine.data() + r * pairs, *sine = table.sine.data() + r * pairs;
      for (int64_t v = 0; v < vectors; ++v) {
        float* tail = x + (r * vectors + v + 1) * width - 2 * pairs;
        for (int64_t j = 0; j < pairs; ++j) {
          const float even = tail[2 * j], odd = tail[2 * j + 1], s = inverse ? -sine[j] : sine[j];
          tail[2 * j] = even * cosine[j] - odd * s;
          tail[2 * j + 1] = even * s + odd * cosine[j];
        }
      }
    }
  });
}

void rotate(float* x, int64_t rows, int64_t vectors, int64_t width, const std::vector<int>& position,
            const std::vector<float>& freq, bool inverse) {
  PLUMB_CHECK(static_cast<int64_t>(position.size()) == rows);
  rotate(x, vectors, width, rotary_table(position, freq), inverse);
}

void hadamard(float* x, int64_t rows, int64_t n) {
  PLUMB_CHECK(n > 0 && (n & (n - 1)) == 0, "width " + std::to_string(n) + " is not a power of two");
  const float scale = static_cast<float>(1 / std::sqrt(static_cast<double>(n)));
  parallel_for(rows, 64, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      float* row = x + r * n;
      if (n < kLanes) {
        butterflies(row, n, 1);
      } else {
        for (int64_t i = 0; i < n; i += kLanes) store(row + i, butterflies_of_8(load(row + i)));
        butterflies(row, n, kLanes);
      }
      for_lanes(
          n, [&](int64_t i, int64_t count) { store_part(row + i, load_part(row + i, count) * splat(scale), count); });
    }
  });
}

}  // namespace plumb::ops
