// Speed of `linear` and its gradients: GFLOP/s, and GB/s of packed weights where these bound it (few rows).
// linear_bench [threads]; prints one table for each vector unit of the machine.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>

#include "base/parallel.h"
#include "base/philox.h"
#include "ops/linear.h"
#include "ops/matmul.h"

namespace plumb {
namespace {

struct Case {
  int rows, out, in;
};

Linear random_weight(WeightFormat format, int out, int in, Random& random) {
  Linear w;
  w.format = format, w.out = out, w.in = in;
  switch (format) {
    case WeightFormat::f32:
      w.data = Tensor::empty({out, in});
      break;
    case WeightFormat::bf16:
      w.data = Tensor::empty({out, in}, DType::bf16);
      break;
    case WeightFormat::fp8:
      w.data = Tensor::empty({out, in}, DType::f8_e4m3);
      w.scale = Tensor::empty({(out + 127) / 128, (in + 127) / 128}, DType::f8_e8m0);
      break;
    case WeightFormat::fp4:
      w.data = Tensor::empty({out, in / 2}, DType::i8);
      w.scale = Tensor::empty({out, in / 32}, DType::f8_e8m0);
      break;
  }
  for (int64_t i = 0; i < out * int64_t{in}; ++i) {
    if (format == WeightFormat::f32) w.data.f32()[i] = random.uniform() - 0.5f;
    if (format == WeightFormat::bf16) w.data.ptr<uint16_t>()[i] = static_cast<uint16_t>(0x3f00 | random.below(128));
  }
  if (w.scale.defined()) {
    for (size_t i = 0; i < w.data.bytes(); ++i) w.data.ptr<uint8_t>()[i] = static_cast<uint8_t>(random.below(126));
    std::fill_n(w.scale.ptr<uint8_t>(), w.scale.numel(), 120);
  }
  return w;
}

// Best of at least 5 runs and 0.15 s, in seconds.
template <class Body>
double best_time(Body&& body) {
  using Clock = std::chrono::steady_clock;
  const auto seconds = [](Clock::duration d) { return std::chrono::duration<double>(d).count(); };
  double best = 1e30;
  const auto start = Clock::now();
  for (int run = 0; run < 5 || seconds(Clock::now() - start) < 0.15; ++run) {
    const auto begin = Clock::now();
    body();
    best = std::min(best, seconds(Clock::now() - begin));
  }
  return best;
}

void report(const char* what, const char* format, Case c, double seconds, size_t weight_bytes) {
  fmt::print("{:<16}{:<6}{:>6}{:>7}{:>7}{:>12.1f}{:>10.1f}\n", what, format, c.rows, c.out, c.in,
             2.0 * c.rows * c.out * c.in / seconds * 1e-9, static_cast<double>(weight_bytes) / seconds * 1e-9);
}

void table() {
  const struct {
    WeightFormat format;
    const char* name;
  } formats[] = {
      {WeightFormat::f32, "f32"}, {WeightFormat::bf16, "bf16"}, {WeightFormat::fp8, "fp8"}, {WeightFormat::fp4, "fp4"}};
  const Case cases[] = {{512, 512, 512}, {384, 2048, 2048}, {128, 512, 256}, {16, 2048, 2048},
                        {4, 2048, 2048}, {1, 512, 512},     {1, 4096, 4096}};
  fmt::print("{:<16}{:<6}{:>6}{:>7}{:>7}{:>12}{:>10}\n", "product", "type", "rows", "out", "in", "GFLOP/s", "GB/s");
  Random random(1);
  for (const Case& c : cases)
    for (const auto& f : formats) {
      if (c.rows == 384 && f.format != WeightFormat::bf16) continue;
      const Linear w = random_weight(f.format, c.out, c.in, random);
      Tensor x = Tensor::empty({c.rows, c.in}), y = Tensor::empty({c.rows, c.out});
      for (int64_t i = 0; i < x.numel(); ++i) x.f32()[i] = random.uniform() - 0.5f;
      report("forward", f.name, c, best_time([&] { ops::linear_into(x.f32(), c.in, c.rows, w, y.f32(), c.out); }),
             w.data.bytes());
      if (c.rows != 512) continue;
      Tensor dx = Tensor::empty({c.rows, c.in});
      report("input gradient", f.name, c,
             best_time([&] { ops::linear_backward_input(y.f32(), c.out, c.rows, w, dx.f32(), c.in, false); }),
             w.data.bytes());
      if (f.format != WeightFormat::f32) continue;
      Tensor dw = Tensor::zeros({c.out, c.in});
      report("weight gradient", f.name, c,
             best_time([&] { ops::linear_backward_weight(y.f32(), c.out, x.f32(), c.in, c.rows, dw); }),
             w.data.bytes());
    }
}

}  // namespace
}  // namespace plumb

int main(int argc, char** argv) {
  using plumb::ops::VectorUnit;
  if (argc > 1) plumb::set_thread_count(std::max(1, std::atoi(argv[1])));
  for (VectorUnit unit : {VectorUnit::avx2, VectorUnit::avx512}) {
    if (!plumb::ops::vector_unit_available(unit)) continue;
    plumb::ops::use_vector_unit(unit);
    fmt::print("{}, {} threads\n", unit == VectorUnit::avx2 ? "AVX2" : "AVX-512", plumb::thread_count());
    plumb::table();
  }
}
