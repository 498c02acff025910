// Exhaustive: every e4m3 and e2m1 code, and every bf16 value rounded to both, against a table made by ml-dtypes.
#include "base/float_formats.h"

#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace plumb {
namespace {

// tests/golden/checkpoint/float_formats.txt: values of codes and, with '>', where bf16 rounding steps to a code.
struct Table {
  std::vector<uint32_t> value;  // FP32 bits of each code
  std::vector<int> first;       // smallest bf16 that rounds to each code
};
std::map<std::string, Table> read_tables() {
  std::ifstream in(PLUMB_SOURCE_DIR "/tests/golden/checkpoint/float_formats.txt");
  std::map<std::string, Table> tables;
  for (std::string line; std::getline(in, line);) {
    if (line[0] == '#') continue;
    std::istringstream words(line);
    std::string format, bits;
    size_t code;
    words >> format >> code >> bits;
    const bool step = format[0] == '>';
    Table& t = tables[step ? format.substr(1) : format];
    EXPECT_EQ(code, step ? t.first.size() : t.value.size());
    if (step)
      t.first.push_back(std::stoi(bits, nullptr, 16));
    else
      t.value.push_back(static_cast<uint32_t>(std::stoul(bits, nullptr, 16)));
  }
  return tables;
}

// Every finite bf16 of both signs; beyond the largest code ours saturates.
template <class Encode>
void check_rounding(const Table& t, int sign_bit, Encode encode) {
  int code = 0;
  for (int b = 0; b < 0x7f80; ++b) {
    while (code + 1 < static_cast<int>(t.first.size()) && b >= t.first[code + 1]) ++code;
    const float x = bf16_to_float(static_cast<uint16_t>(b));
    ASSERT_EQ(encode(x), code) << x;
    ASSERT_EQ(encode(-x), code | sign_bit) << -x;
  }
}

TEST(FloatFormats, E4m3MatchesMlDtypes) {
  const Table t = read_tables()["e4m3"];
  ASSERT_EQ(t.value.size(), 127u);
  for (int c = 0; c < 127; ++c) {
    EXPECT_EQ(std::bit_cast<uint32_t>(e4m3_to_float(static_cast<uint8_t>(c))), t.value[c]);
    EXPECT_EQ(std::bit_cast<uint32_t>(e4m3_to_float(static_cast<uint8_t>(c | 0x80))), t.value[c] | 0x80000000u);
    EXPECT_EQ(float_to_e4m3(std::bit_cast<float>(t.value[c])), c);
  }
  EXPECT_TRUE(std::isnan(e4m3_to_float(0x7f)) && std::isnan(e4m3_to_float(0xff)));
  check_rounding(t, 0x80, float_to_e4m3);
  EXPECT_EQ(float_to_e4m3(INFINITY), 0x7e);
  EXPECT_EQ(float_to_e4m3(-INFINITY), 0xfe);
  EXPECT_EQ(float_to_e4m3(NAN), 0x7f);
}

TEST(FloatFormats, E2m1MatchesMlDtypes) {
  const Table t = read_tables()["e2m1"];
  ASSERT_EQ(t.value.size(), 8u);
  for (int c = 0; c < 8; ++c) {
    EXPECT_EQ(std::bit_cast<uint32_t>(e2m1_to_float(static_cast<uint8_t>(c))), t.value[c]);
    EXPECT_EQ(std::bit_cast<uint32_t>(e2m1_to_float(static_cast<uint8_t>(c | 8))), t.value[c] | 0x80000000u);
  }
  check_rounding(t, 8, float_to_e2m1);
}

// Between two neighbouring codes only the midpoint is a tie; it goes to the even code. FP32 next to it must not.
TEST(FloatFormats, TiesGoToEvenAndNothingElseIsATie) {
  const auto tables = read_tables();
  const auto check = [](const Table& t, auto encode) {
    for (size_t c = 0; c + 1 < t.value.size(); ++c) {
      const float low = std::bit_cast<float>(t.value[c]), high = std::bit_cast<float>(t.value[c + 1]);
      const float middle = low + (high - low) / 2;  // exact: codes have few bits
      EXPECT_EQ(encode(middle), c % 2 == 0 ? c : c + 1) << middle;
      EXPECT_EQ(encode(std::nextafter(middle, 0.0f)), c);
      EXPECT_EQ(encode(std::nextafter(middle, 1e9f)), c + 1);
    }
  };
  check(tables.at("e4m3"), float_to_e4m3);
  check(tables.at("e2m1"), float_to_e2m1);
}

TEST(FloatFormats, RoundingWithoutCodesAgreesWithTheCodes) {
  for (int b = 0; b < 0x7f80; ++b) {
    const float x = bf16_to_float(static_cast<uint16_t>(b));
    if (x <= 448) {
      EXPECT_EQ(round_e4m3(x), e4m3_to_float(float_to_e4m3(x)));
    }
    if (x <= 6) {
      EXPECT_EQ(round_e2m1(-x), e2m1_to_float(float_to_e2m1(-x)));
    }
  }
}

TEST(FloatFormats, E8m0IsThePowerOfItsCode) {
  for (int c = 0; c < 255; ++c) {
    const float x = e8m0_to_float(static_cast<uint8_t>(c));
    EXPECT_EQ(x, std::ldexp(1.0f, c - 127));
    if (c > 0) {
      EXPECT_EQ(pow2_to_e8m0(x), c);
    }
  }
  EXPECT_TRUE(std::isnan(e8m0_to_float(255)));
}

// spec: model.md A12.
TEST(FloatFormats, ScalesOfTheDynamicQuantisers) {
  EXPECT_EQ(fp8_scale(448), 1);
  EXPECT_EQ(fp8_scale(449), 2);
  EXPECT_EQ(fp8_scale(1), 0x1p-8f);
  EXPECT_EQ(fp8_scale(3.5f), 0x1p-7f);
  EXPECT_EQ(fp8_scale(0), 0x1p-22f);
  EXPECT_EQ(fp4_scale(6), 1);
  EXPECT_EQ(fp4_scale(6.1f), 2);
  EXPECT_EQ(fp4_scale(1), 0.25f);
  EXPECT_EQ(fp4_scale(0), 0x1p-126f);
}

TEST(FloatFormats, Bf16RoundsToNearestEven) {
  for (uint32_t b = 0; b < 0x7f80; ++b) {
    const uint32_t low = b << 16;
    EXPECT_EQ(float_to_bf16(std::bit_cast<float>(low)), b);
    EXPECT_EQ(float_to_bf16(std::bit_cast<float>(low | 0x7fff)), b);
    EXPECT_EQ(float_to_bf16(std::bit_cast<float>(low | 0x8000)), b + (b & 1));
    EXPECT_EQ(float_to_bf16(std::bit_cast<float>(low | 0x80008001)), (b + 1) | 0x8000);
  }
  EXPECT_TRUE(std::isnan(bf16_to_float(float_to_bf16(NAN))));
  EXPECT_TRUE(
      std::isnan(bf16_to_float(float_to_bf16(std::bit_cast<float>(0x7f800001u)))));  // NaN whose low half alone says so
}

}  // namespace
}  // namespace plumb
