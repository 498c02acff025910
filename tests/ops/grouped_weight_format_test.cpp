// The load-time packer of the GPU's grouped products, without a GPU: every weight of a packed matrix, read back through
// the documented places, has the value that the checkpoint's formats give it.
#include "kernels/grouped_linear/weight_format.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "base/float_formats.h"

namespace plumb::kernels::grouped_linear {
namespace {

// A random FP4 matrix whose scales spread over `spread` exponents.
struct Fp4Sample {
  int n, k;
  std::vector<uint8_t> codes, scales;
  Fp4Sample(int rows, int columns, int spread, int seed) : n(rows), k(columns), codes(n * k / 2), scales(n * k / 32) {
    std::mt19937 random(seed);
    for (auto& c : codes) c = static_cast<uint8_t>(random());
    for (auto& s : scales) s = static_cast<uint8_t>(110 + random() % (spread + 1));
  }
  double value(int row, int column) const {
    const uint8_t byte = codes[(row * k + column) / 2];
    return static_cast<double>(e2m1_to_float(column % 2 ? byte >> 4 : byte & 15)) *
           std::ldexp(1.0, scales[(row * k + column) / 32] - 127);
  }
  Fp4Matrix matrix() const { return {codes.data(), scales.data()}; }
};

// The e4m3 byte of (row of the record, k inside 128), found by walking the threads' code words.
std::vector<uint8_t> unpack_fp4_record(const uint8_t* record) {
  std::vector<uint8_t> bytes(kRecordRows * kBlock, 0x7f);
  for (int slab = 0; slab < 4; ++slab)
    for (int thread = 0; thread < 128; ++thread)
      for (int i = 0; i < 8; ++i) {
        const CodeWord w = code_word(thread, i);
        uint32_t word;
        std::memcpy(&word, record + slab * kSlabCodeBytes + w.byte, 4);
        const uint8_t offset = record[4 * kSlabCodeBytes + slab * kSlabOffsetBytes + offset_byte(w.row, thread % 4)];
        const MagnitudeTable table = magnitude_table(offset);
        const uint32_t four[2] = {expand_first(table, word), expand_second(table, word)};
        for (int c = 0; c < 8; ++c)
          bytes[(slab * kSlabRows + w.row) * kBlock + k_of_place(w.place + c / 4 * 16 + c % 4)] =
              static_cast<uint8_t>(four[c / 4] >> (8 * (c % 4)));
      }
  return bytes;
}

TEST(GroupedWeightFormat, PermutationsAreBijections) {
  std::vector<int> k_seen(kBlock), hidden_seen(kBlock);
  for (int i = 0; i < kBlock; ++i) ++k_seen[k_of_place(i)], ++hidden_seen[hidden_of_row(i)];
  for (int i = 0; i < kBlock; ++i) EXPECT_EQ(k_seen[i] * hidden_seen[i], 1);
}

// e2m1(code) * 2^(offset - 5) as e4m3, for all codes, offsets and positions in a word, against the scalar conversions.
TEST(GroupedWeightFormat, ExpansionIsExactForAllCodesAndExponents) {
  for (int offset = 0; offset <= kLargestSpan; ++offset)
    for (int code = 0; code < 16; ++code)
      for (int position = 0; position < 8; ++position) {
        uint16_t quad[2] = {0x1248, 0x9999};  // anything else around it
        quad[position / 4] =
            static_cast<uint16_t>((quad[position / 4] & ~(15 << (position % 4 * 4))) | code << (position % 4 * 4));
        const uint32_t word = arrange_codes(quad[0], quad[1]);
        const MagnitudeTable table = magnitude_table(offset);
        const uint32_t four = position < 4 ? expand_first(table, word) : expand_second(table, word);
        const float expected = e2m1_to_float(code) * std::ldexp(1.0f, offset - 5);
        const uint8_t byte = static_cast<uint8_t>(four >> (8 * (position % 4)));
        EXPECT_EQ(e4m3_to_float(byte), expected) << "code " << code << " offset " << offset << " position " << position;
        EXPECT_EQ(byte >> 7, code >> 3) << "sign of code " << code;
      }
}

TEST(GroupedWeightFormat, Fp4RecordsHoldTheMatrix) {
  const Fp4Sample w(512, 256, kLargestSpan, 1);
  const int k_blocks = w.k / kBlock;
  std::vector<uint8_t> records(w.n / kRecordRows * k_blocks * kFp4RecordBytes);
  std::vector<float> bases(w.n / kBlock * block_stride(w.k));
  const PackReport report = pack_rows(w.matrix(), w.k, 0, w.n / kRecordRows, records.data(), bases.data());
  ASSERT_TRUE(report.ok()) << describe(report);
  for (int r = 0; r < w.n / kRecordRows; ++r)
    for (int kb = 0; kb < k_blocks; ++kb) {
      const auto bytes = unpack_fp4_record(&records[(r * k_blocks + kb) * kFp4RecordBytes]);
      for (int row = 0; row < kRecordRows; ++row)
        for (int k = 0; k < kBlock; ++k)
          ASSERT_EQ(static_cast<double>(e4m3_to_float(bytes[row * kBlock + k])) *
                        bases[(r * 2 + row / kBlock) * block_stride(w.k) + kb],
                    w.value(r * kRecordRows + row, kb * kBlock + k))
              << "record " << r << " row " << row << " k " << kb * kBlock + k;
    }
}

// Exponents that FP4 records cannot hold, as FP8: still the values of the matrix, subnormal numbers among them.
TEST(GroupedWeightFormat, Fp4MatricesOfWideBlocksFitIntoFp8Records) {
  const Fp4Sample w(256, 256, kLargestSpanAsFp8, 7);
  std::vector<uint8_t> records(2 * kFp8RecordBytes);
  std::vector<float> bases(2 * block_stride(w.k));
  EXPECT_FALSE(pack_rows(w.matrix(), w.k, 0, 1, records.data(), bases.data()).ok());
  const PackReport report = pack_rows(Fp4AsFp8Matrix{w.matrix()}, w.k, 0, 1, records.data(), bases.data());
  ASSERT_TRUE(report.ok()) << describe(report);
  int subnormal = 0;
  for (int row = 0; row < w.n; ++row)
    for (int place = 0; place < w.k; ++place) {
      const int kb = place / kBlock;
      const uint8_t byte = records[kb * kFp8RecordBytes + swizzled_byte(row, place % kBlock)];
      subnormal += (byte & 0x78) == 0 && (byte & 7) != 0;
      ASSERT_EQ(static_cast<double>(e4m3_to_float(byte)) * bases[row / kBlock * block_stride(w.k) + kb],
                w.value(row, kb * kBlock + k_of_place(place % kBlock)))
          << "row " << row << " place " << place;
    }
  EXPECT_GT(subnormal, 1000);
  const Fp4Sample wider(256, 128, kLargestSpanAsFp8 + 1, 8);
  EXPECT_EQ(pack_rows(Fp4AsFp8Matrix{wider.matrix()}, wider.k, 0, 1, records.data(), bases.data()).wide_blocks, 2);
}

TEST(GroupedWeightFormat, GateAndUpShareRecords) {
  const Fp4Sample gate(256, 128, 3, 2), up(256, 128, 5, 3);
  std::vector<uint8_t> records(2 * kFp4RecordBytes);
  std::vector<float> bases(4 * block_stride(128));
  ASSERT_TRUE(pack_gate_up_rows(gate.matrix(), up.matrix(), 128, 0, 2, records.data(), bases.data()).ok());
  for (int r = 0; r < 2; ++r) {
    const auto bytes = unpack_fp4_record(&records[r * kFp4RecordBytes]);
    for (int row = 0; row < kRecordRows; ++row)
      for (int k = 0; k < kBlock; ++k)
        ASSERT_EQ(static_cast<double>(e4m3_to_float(bytes[row * kBlock + k])) *
                      bases[(r * 2 + row / kBlock) * block_stride(128)],
                  (row < kBlock ? gate : up).value(r * kBlock + hidden_of_row(row % kBlock), k));
  }
}

TEST(GroupedWeightFormat, Fp8RecordsHoldTheMatrix) {
  const int n = 256, k = 256;
  std::mt19937 random(4);
  std::vector<uint8_t> values(n * k), scales = {120, 127, 131, 100}, records(2 * kFp8RecordBytes);
  for (auto& v : values) v = static_cast<uint8_t>(random() % 127 | (random() & 128));
  std::vector<float> bases(2 * block_stride(k));
  ASSERT_TRUE(pack_rows(Fp8Matrix{values.data(), scales.data()}, k, 0, 1, records.data(), bases.data()).ok());
  for (int i = 0; i < 4; ++i) EXPECT_EQ(bases[i / 2 * block_stride(k) + i % 2], e8m0_to_float(scales[i]));
  for (int row = 0; row < n; ++row)
    for (int place = 0; place < k; ++place)
      ASSERT_EQ(records[place / kBlock * kFp8RecordBytes + swizzled_byte(row, place % kBlock)],
                values[row * k + place / kBlock * kBlock + k_of_place(place % kBlock)]);
}

TEST(GroupedWeightFormat, CheckerFindsWideSpansAndNaNs) {
  Fp4Sample w(256, 256, 0, 5);
  std::vector<uint8_t> records(2 * kFp4RecordBytes);
  std::vector<float> bases(2 * block_stride(w.k));
  const auto pack = [&] { return pack_rows(w.matrix(), w.k, 0, 1, records.data(), bases.data()); };
  std::fill(w.codes.begin(), w.codes.end(), 0x35);
  EXPECT_TRUE(pack().ok());
  w.scales[3 * 8 + 1] = 110 - kLargestSpan;  // the largest span that is exact
  EXPECT_TRUE(pack().ok());
  w.scales[200 * 8 + 6] = 110 + kLargestSpan + 1;  // row 200, k = 192: block (128, 128)
  EXPECT_EQ(pack().wide_blocks, 1);
  EXPECT_EQ(pack().row, 128);
  EXPECT_EQ(pack().column, 128);
  EXPECT_EQ(pack().span, kLargestSpan + 1);
  EXPECT_NE(describe(pack()).find("row 128, column 128 (span 12)"), std::string::npos) << describe(pack());
  std::fill_n(w.codes.begin() + 200 * 128 + 96, 16, uint8_t{0x80});  // the same group, all zeros (and minus zeros)
  EXPECT_TRUE(pack().ok());
  w.scales[50 * 8] = 255;
  EXPECT_EQ(pack().nans, 1);
  EXPECT_FALSE(pack().ok());
}

// A block of zeros has no largest exponent; its base must be finite.
TEST(GroupedWeightFormat, ZeroBlock) {
  Fp4Sample w(256, 128, 4, 6);
  std::fill(w.codes.begin(), w.codes.end(), 0);
  std::vector<uint8_t> records(kFp4RecordBytes);
  std::vector<float> bases(2 * block_stride(w.k));
  ASSERT_TRUE(pack_rows(w.matrix(), w.k, 0, 1, records.data(), bases.data()).ok());
  EXPECT_EQ(bases[0], 1.0f);
  for (const uint8_t byte : unpack_fp4_record(records.data())) ASSERT_EQ(byte, 0);
}

}  // namespace
}  // namespace plumb::kernels::grouped_linear
