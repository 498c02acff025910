// The small kernels between the others, against the formulas in FP64 and against the kernels that fuse them. Tests
// named Small* also run under compute-sanitizer.
#include "kernels/glue/glue.h"

#include <gtest/gtest.h>

#include "device_data.cuh"
#include "kernels/hyper_connections/hyper_connections.h"

namespace plumb::kernels::glue {
namespace {

TEST(Small, StreamsTakeUpAnOutput) {
  const int rows = 5, width = 256;
  const auto out = random_bf16(rows * width, 1, 1), streams = random_bf16(rows * 4 * width, 1, 2);
  const auto finished = random_floats(rows * 24, 0.5f, 3);
  const Buffer<uint16_t> out_device(out), streams_device(streams), next(rows * 4 * width);
  const Buffer<float> finished_device(finished);
  take_up(out_device.get(), streams_device.get(), finished_device.get(), rows, width, next.get(), nullptr);
  const auto found = next.host();
  for (int r = 0; r < rows; ++r)
    for (int k = 0; k < 4; ++k)
      for (int c = 0; c < width; ++c) {
        const float* f = finished.data() + r * 24;
        double want = double{f[4 + k]} * bf16_to_float(out[r * width + c]), size = std::fabs(want);
        for (int j = 0; j < 4; ++j) {
          const double term = double{f[8 + j * 4 + k]} * bf16_to_float(streams[(r * 4 + j) * width + c]);
          want += term, size += std::fabs(term);
        }
        // One rounding to bf16, and FP32 sums of five terms.
        EXPECT_NEAR(bf16_to_float(found[(r * 4 + k) * width + c]), want, std::fabs(want) * 0x1p-8 + size * 1e-6);
      }
}

// A boundary, which does the same on the way to the next sublayer, leaves the same bits.
TEST(Small, StreamsHaveTheBitsOfABoundary) {
  const int rows = 3, width = 512;
  const Buffer<uint16_t> out(random_bf16(rows * width, 1, 4)), streams(random_bf16(rows * 4 * width, 1, 5));
  const Buffer<float> finished(random_floats(rows * 24, 0.5f, 6));
  const Buffer<uint16_t> alone(rows * 4 * width), fused(rows * 4 * width), x(rows * width);
  take_up(out.get(), streams.get(), finished.get(), rows, width, alone.get(), nullptr);
  const Buffer<float> fn(random_floats(24 * 4 * width, 0.02f, 7)), base(random_floats(24, 1, 8)),
      scale(random_floats(3, 1, 9)), norm(random_floats(width, 1, 10)), coefficients(rows * 24), mix(rows * 24),
      rho(rows);
  const Buffer<uint8_t> workspace(hyper_boundary_workspace(rows, width));
  HyperBoundary p{};
  p.streams = streams.get(), p.out = out.get(), p.finished = finished.get(), p.next = fused.get();
  p.mapping = {fn.get(), base.get(), scale.get(), 24, 20, 1e-6f, 1e-6f};
  p.coefficients = coefficients.get(), p.mix = mix.get(), p.rho = rho.get();
  p.norm_weight = norm.get(), p.rms_eps = 1e-6f, p.x = x.get(), p.workspace = workspace.get();
  p.rows = rows, p.width = width;
  check_cuda(hyper_boundary(p, nullptr), "hyper_boundary");
  EXPECT_EQ(differences(alone.host(), fused.host()), 0u);
}

TEST(Small, WordsAndColumnsGoWhereTheyShould) {
  const Buffer<float> x(std::vector<float>{1, 2, 3});
  const Buffer<int> index(std::vector<int>{2, -1, 0, 2});
  const Buffer<float> gathered(4);
  gather_words(x.get(), index.get(), 4, gathered.get(), nullptr);
  EXPECT_EQ(gathered.host(), (std::vector<float>{3, 0, 1, 3}));

  std::vector<uint64_t> words(70);
  for (size_t i = 0; i < words.size(); ++i) words[i] = i * 0x123456789ULL;
  const Buffer<uint64_t> written(words.size());
  write_words(words.data(), static_cast<int>(words.size()), written.get(), nullptr);
  EXPECT_EQ(written.host(), words);

  const Buffer<float> from(std::vector<float>{1, 2, 3, 4}), to(std::vector<float>(8, 0));
  place_columns(from.get(), 2, 2, to.get(), 4, 1, nullptr);
  EXPECT_EQ(to.host(), (std::vector<float>{0, 1, 2, 0, 0, 3, 4, 0}));
  const Buffer<float> sum(std::vector<float>{10, 20, 30, 40});
  add_columns(to.get(), 2, 4, 1, sum.get(), 2, nullptr);
  EXPECT_EQ(sum.host(), (std::vector<float>{11, 22, 33, 44}));
}

}  // namespace
}  // namespace plumb::kernels::glue
