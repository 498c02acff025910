#include "ops/numerics.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <sstream>

#include "base/error.h"
#include "base/float_formats.h"
#include "base/philox.h"

namespace plumb {
namespace {

constexpr Point kExample[] = {Point::hc_pre, Point::act_w13, Point::sim_kv, Point::sim_iq};  // one of each kind

TEST(Numerics, NamesGoBothWaysAndUnknownOnesThrow) {
  for (Numerics n : {Numerics::fp32, Numerics::bf16, Numerics::released})
    EXPECT_EQ(numerics_from_name(numerics_name(n)), n);
  EXPECT_THROW(numerics_from_name("fp16"), Error);
}

TEST(Numerics, DocumentedTableIsWhatTheProfilesDo) {
  std::ifstream file(PLUMB_SOURCE_DIR "/docs/numerics.md");
  const std::map<std::string, PointKind> kinds = {{"bf16", PointKind::bf16},
                                                  {"fp8x128", PointKind::fp8x128},
                                                  {"fp8x64", PointKind::fp8x64},
                                                  {"fp4x32", PointKind::fp4x32}};
  int point = 0;
  for (std::string line, bar, name, kind; std::getline(file, line);) {
    std::istringstream words(line);
    if (!(words >> bar >> name >> bar >> kind) || bar != "|" || name.find('.') == std::string::npos) continue;
    const Point p = static_cast<Point>(point++);
    ASSERT_EQ(name, point_name(p));
    EXPECT_EQ(point_kind(Numerics::released, p), kinds.at(kind)) << name;
    EXPECT_EQ(point_kind(Numerics::fp32, p), PointKind::keep) << name;
    const bool kept = kind != "bf16" || name.starts_with("had.");
    EXPECT_EQ(point_kind(Numerics::bf16, p), kept ? PointKind::keep : PointKind::bf16) << name;
  }
  EXPECT_EQ(point, static_cast<int>(Point::none));
  EXPECT_EQ(point_kind(Numerics::released, Point::none), PointKind::keep);
}

std::vector<float> hex_floats(std::istringstream& words) {
  std::vector<float> values;
  for (uint32_t bits; words >> std::hex >> bits;) values.push_back(std::bit_cast<float>(bits));
  return values;
}

TEST(Numerics, RoundingEqualsTheOracleBitForBit) {
  std::ifstream file(PLUMB_SOURCE_DIR "/tests/golden/rounding.txt");
  int cases = 0;
  for (std::string line, next; std::getline(file, line);) {
    if (line.starts_with("#")) continue;
    std::getline(file, next);
    std::istringstream before(line), after(next);
    std::string kind;
    before >> kind, after >> kind;
    std::vector<float> x = hex_floats(before), want = hex_floats(after);
    const Point p = kExample[kind == "bf16" ? 0 : kind == "fp8x128" ? 1 : kind == "fp8x64" ? 2 : 3];
    ops::round_point(Numerics::released, p, x.data(), 1, static_cast<int64_t>(x.size()), 0);
    for (size_t i = 0; i < x.size(); ++i)
      ASSERT_EQ(std::bit_cast<uint32_t>(x[i]), std::bit_cast<uint32_t>(want[i])) << kind << " " << i;
    ++cases;
  }
  EXPECT_EQ(cases, 16);
}

// The scalar functions of base/float_formats.h are tested exhaustively against another library.
float round_alone(PointKind kind, float x, float amax) {
  if (kind == PointKind::bf16) return round_bf16(x);
  const bool fp4 = kind == PointKind::fp4x32;
  const float scale = fp4 ? fp4_scale(amax) : fp8_scale(amax);
  const float top = fp4 ? 6 : 448, v = std::min(std::max(x / scale, -top), top);
  return std::copysign((fp4 ? round_e2m1(v) : round_e4m3(v)) * scale, x);
}

TEST(Numerics, RandomRowsEqualScalarRounding) {
  Random random(3);
  const int blocks[] = {1, 128, 64, 32};
  for (int k = 0; k < 4; ++k)
    for (int width : {1, 7, 31, 32, 64, 127, 128, 200, 257}) {
      const int rows = 3, ld = width + 5;
      std::vector<float> x(rows * ld);
      for (float& v : x) v = random.normal() * std::exp2(static_cast<float>(random.below(40)) - 20.0f);
      std::vector<float> want = x;
      for (int r = 0; r < rows; ++r)
        for (int c = 0; c < width; ++c) {
          float amax = 0;
          const int first = c / blocks[k] * blocks[k];
          for (int i = first; i < std::min(first + blocks[k], width); ++i)
            amax = std::max(amax, std::fabs(x[r * ld + i]));
          want[r * ld + c] = round_alone(point_kind(Numerics::released, kExample[k]), x[r * ld + c], amax);
        }
      ops::round_point(Numerics::released, kExample[k], x.data(), rows, width, ld);
      EXPECT_EQ(std::memcmp(x.data(), want.data(), x.size() * sizeof(float)), 0) << k << " " << width;
    }
}

TEST(Numerics, InfinitiesAndNansShow) {
  for (Point p : kExample)
    for (float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
      Tensor x = Tensor::full({1, 128}, 1);
      x.f32()[5] = bad;
      ops::round_point(Numerics::released, p, x);
      EXPECT_FALSE(std::isfinite(x.f32()[5]));
    }
  ops::round_point(Numerics::released, Point::act_w13, Tensor::empty({0, 8}));
}

}  // namespace
}  // namespace plumb
