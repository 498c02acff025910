// How packed weights lie in GPU memory, and the load-time packer that puts them there. Host code without CUDA, so that
// it is tested where no GPU is; the kernels share the layout constants and the expansion of FP4.
//
// A matrix W [N, K] (N output rows, a multiple of 256; K inputs, a multiple of 128) becomes N/256 x K/128 records and
// one FP32 base a 128 x 128 block. The value of a weight is its e4m3 number times the base of its block.
//   FP8: on disk e4m3 [N, K] with e8m0 scales [N/128, K/128]. base = scale. A record is 256 rows x 128 bytes in the
//        128-byte swizzle: 32,768 bytes.
//   FP4: on disk e2m1 codes [N, K/2] (low nibble = even k) with e8m0 scales [N, K/32] (byte s means 2^(s - 127)).
//        base = 2^(largest s of the block - 127 - 6); what remains, e2m1(code) * 2^j with j = s - largest s + 6, is
//        expanded to e4m3 in the kernel. j = 6 puts the largest code at 6 * 64 = 384 < 448, j = -5 keeps 0.5 * 2^-5 =
//        2^-6 a normal e4m3: exact for exponents that span at most 11 in a block (all-zero groups do not count). The
//        packer reports blocks that span more (a matrix of up to 14 can be packed as FP8, Fp4AsFp8Matrix). A record is
//        4 slabs of 64 rows x 4,096 bytes of codes, in the order in which threads hold an m64k32 operand, then 4 x 256
//        bytes of j + 5: 17,408 bytes, 4.25 bits a weight as on disk.
// Records lie [group][N/256][K/128], bases [group][N/128][block_stride(K)].
//
// Order of K. Inside every 128 of K both operands of a product are permuted (k_of_place). The tensor core then hands
// all 32 codes that share an FP4 scale to the threads of one quad position, and a thread needs two look-up tables for
// 64 codes instead of eight. quantise_rows and the fused epilogue write activations in this order; sums walk K in it,
// so it is part of the bits of a result.
//
// Order of rows. A plain matrix keeps its own. A gate and an up projection share records: rows 0..127 of record r are
// gate rows 128 r + hidden_of_row(0..127), the other 128 the up rows of the same hidden units. The order makes the
// hidden units that a thread of the wide kernel holds neighbours in the permuted K order of the next product.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>

#ifdef __CUDACC__
#define PLUMB_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define PLUMB_HOST_DEVICE inline
#endif

namespace plumb::kernels::grouped_linear {

enum class WeightFormat { fp8, fp4 };

constexpr int kRecordRows = 256;
constexpr int kBlock = 128;  // edge of a weight block, and the length of K between two FP32 promotions
constexpr int kSlabRows = 64;
constexpr int kSlabCodeBytes = kSlabRows * kBlock / 2;
constexpr int kSlabOffsetBytes = kSlabRows * kBlock / 32;
constexpr int kFp4RecordBytes = 4 * (kSlabCodeBytes + kSlabOffsetBytes);
constexpr int kFp8RecordBytes = kRecordRows * kBlock;
constexpr int kLargestSpan = 11, kLargestSpanAsFp8 = 14;
constexpr int record_bytes(WeightFormat format) {
  return format == WeightFormat::fp4 ? kFp4RecordBytes : kFp8RecordBytes;
}

// The number of 128-blocks of K, padded to what the copy engine can address: the length of a row of bases or of scales.
constexpr int block_stride(int k) { return (k / kBlock + 3) / 4 * 4; }

// Which k (inside 128) lies at a place of the permuted order: place 32 s + 16 h + 4 q + i holds k = 32 q + 8 s + 4 h +
// i. Four neighbours stay neighbours.
PLUMB_HOST_DEVICE int k_of_place(int place) {
  return (place / 4 % 4) * 32 + (place / 32) * 8 + (place / 16 % 2) * 4 + place % 4;
}
// Row n = 8 j + 2 q + b of a gate or up block is the hidden unit at place 32 q + 2 j + b of the next product's K.
PLUMB_HOST_DEVICE int place_of_row(int row) { return (row / 2 % 4) * 32 + (row / 8) * 2 + row % 2; }
PLUMB_HOST_DEVICE int hidden_of_row(int row) { return k_of_place(place_of_row(row)); }
// Row of [n, k] (n/2 gates, then n/2 ups) that lies at a row of the shared records.
PLUMB_HOST_DEVICE int natural_row(int row, int n) {
  return row / 128 % 2 * (n / 2) + row / 256 * 128 + hidden_of_row(row % 128);
}

// ---- FP4 codes -----------------------------------------------------------------------------------------------------
// Eight codes (two times four neighbours in k, nibbles as on disk) in a word, arranged for two byte permutations: the
// 3-bit magnitudes sit in the low bits of nibbles 0-7 (they are the selectors); the spare top bits of the odd nibbles
// are the signs of codes 0-3 (already at bit 7 of each byte), those of the even nibbles the signs of codes 4-7 (one
// shift away).
inline uint32_t arrange_codes(uint16_t first, uint16_t second) {
  const auto spread = [](uint32_t x) {  // the top bit of nibble i to bit 8 i + 7
    return (x & 0x8u) << 4 | (x & 0x80u) << 8 | (x & 0x800u) << 12 | (x & 0x8000u) << 16;
  };
  return (first & 0x7777u) | (second & 0x7777u) << 16 | spread(first) | spread(second) >> 4;
}

// Byte i of the result is byte (nibble i of selectors) of the eight bytes low, high.
PLUMB_HOST_DEVICE uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selectors) {
#ifdef __CUDA_ARCH__
  uint32_t result;  // as assembly: the compiler would otherwise mask each half of `selectors` anew
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(selectors));
  return result;
#else
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i)
    result |= static_cast<uint32_t>(bytes >> (8 * (selectors >> (4 * i) & 7)) & 255) << (8 * i);
  return result;
#endif
}

// The e4m3 bytes of the eight magnitudes times 2^(offset - 5), offset 0..11: those of {0, .5, 1, 1.5} and {2, 3, 4, 6}
// times 2^-5, to which a step of the exponent adds 8 each, except for zero.
struct MagnitudeTable {
  uint32_t small, large;
};
PLUMB_HOST_DEVICE MagnitudeTable magnitude_table(uint32_t offset) {
  return {0x14100800u + offset * 0x08080800u, 0x24201C18u + offset * 0x08080808u};
}
PLUMB_HOST_DEVICE uint32_t expand_first(MagnitudeTable table, uint32_t word) {  // codes 0-3 as four e4m3
  return permute_bytes(table.small, table.large, word & 0x77777777u) | (word & 0x80808080u);
}
PLUMB_HOST_DEVICE uint32_t expand_second(MagnitudeTable table, uint32_t word) {  // codes 4-7
  const uint32_t selectors = word & 0x77777777u;
  uint32_t upper = selectors >> 16;
#ifdef __CUDA_ARCH__
  asm("shr.u32 %0, %1, 16;" : "=r"(upper) : "r"(selectors));  // the compiler would mask the upper half anew
#endif
  return permute_bytes(table.small, table.large, upper) | (word << 4 & 0x80808080u);
}

// Where word `index` (0..7) of a warpgroup's thread 0..127 lies in a slab, and what it holds: row `row` of the slab,
// its codes 0-3 at places `place` .. + 3 of the 128 and codes 4-7 at place + 16 ...
struct CodeWord {
  int byte, row, place;
};
PLUMB_HOST_DEVICE CodeWord code_word(int thread, int index) {
  const int lane = thread % 32;
  return {(index / 4) * (kSlabCodeBytes / 2) + thread * 16 + index % 4 * 4,
          thread / 32 * 16 + lane / 4 + (index & 1) * 8, index / 2 * 32 + lane % 4 * 4};
}
// Where the offset j + 5 of (row of the slab, 32 of k) lies in the slab's 256 bytes: thread t reads bytes 2 t and 2 t
// + 1.
PLUMB_HOST_DEVICE int offset_byte(int row, int k_group) {
  return (row / 16 * 32 + row % 8 * 4 + k_group) * 2 + row / 8 % 2;
}
PLUMB_HOST_DEVICE uint32_t swizzled_byte(int row, int byte) {  // inside an FP8 record
  return row * 128 + ((((byte >> 4) ^ (row & 7)) << 4) | (byte & 15));
}

// ---- The packer (host) ---------------------------------------------------------------------------------------------
struct Fp4Matrix {
  const uint8_t* codes;   // [N, K/2]
  const uint8_t* scales;  // [N, K/32], e8m0
};
// The same, to be packed as FP8: twice the memory, for matrices of blocks that span up to kLargestSpanAsFp8 exponents.
// Subnormal e4m3 numbers hold the smallest three; the values are still exact.
struct Fp4AsFp8Matrix : Fp4Matrix {};
struct Fp8Matrix {
  const uint8_t* values;  // [N, K], e4m3
  const uint8_t* scales;  // [N/128, K/128], e8m0
};

// What is wrong with a matrix. Records of a matrix that is not ok() must not be used.
struct PackReport {
  int64_t wide_blocks = 0;              // 128 x 128 blocks whose exponents span more than the format holds
  int64_t nans = 0;                     // NaN scales (byte 255) or values
  int row = -1, column = -1, span = 0;  // the first such block's origin, and the span found there
  bool ok() const { return wide_blocks == 0 && nans == 0; }
  void blame(int block_row, int block_column, int block_span) {
    if (row < 0) row = block_row, column = block_column, span = block_span;
  }
};
inline std::string describe(const PackReport& r) {
  if (r.ok()) return "exact";
  return std::to_string(r.wide_blocks) + " blocks of 128 x 128 have FP4 scales that span more than the " +
         std::to_string(kLargestSpan) + " exponents that are exact (" + std::to_string(kLargestSpanAsFp8) +
         " if packed as FP8) and " + std::to_string(r.nans) + " NaNs were found; the first bad block starts at row " +
         std::to_string(r.row) + ", column " + std::to_string(r.column) + " (span " + std::to_string(r.span) + ")";
}

namespace detail {

constexpr int kGroups = kBlock / 32;  // of a row of a block

// The exponents of a 128 x 128 block, -1 where all codes are zero, and what is wrong with it.
struct BlockExponents {
  int of[kBlock][kGroups], largest = -1;
  float base() const { return largest < 0 ? 1.0f : std::ldexp(1.0f, largest - 127 - 6); }
};
template <typename RowOf>
BlockExponents block_exponents(const Fp4Matrix& m, int k, int first_row, int k_block, RowOf row_of, int largest_span,
                               PackReport& report) {
  BlockExponents e;
  int smallest = 255;
  int64_t nans = 0;
  for (int row = 0; row < kBlock; ++row) {
    const size_t source = first_row + row_of(row);
    for (int g = 0; g < kGroups; ++g) {
      uint64_t codes[2];
      std::memcpy(codes, m.codes + source * (k / 2) + k_block * (kBlock / 2) + g * 16, 16);
      const bool empty = ((codes[0] | codes[1]) & 0x7777777777777777u) == 0;
      const int s = m.scales[source * (k / 32) + k_block * kGroups + g];
      nans += s == 255;
      e.of[row][g] = empty ? -1 : s;
      if (!empty) e.largest = std::max(e.largest, s), smallest = std::min(smallest, s);
    }
  }
  const int span = std::max(e.largest - smallest, 0);
  report.nans += nans;
  report.wide_blocks += span > largest_span;
  if (nans || span > largest_span) report.blame(first_row, k_block * kBlock, span);
  return e;
}

// e2m1(code) * 2^exponent as e4m3, exponent -8 .. 6.
inline uint8_t e4m3_of(int code, int exponent) {
  constexpr int kHalves[8] = {0, 1, 2, 3, 4, 6, 8, 12};  // magnitudes
  int mantissa = kHalves[code & 7];                      // times 2^(exponent - 1)
  const int sign = (code & 8) << 4;
  if (mantissa == 0) return static_cast<uint8_t>(sign);
  int power = exponent - 1;  // magnitude = mantissa * 2^power, and 2^-9 is the step of subnormal numbers
  while (mantissa < 8 && power > -9) mantissa *= 2, --power;
  while (mantissa >= 16) mantissa /= 2, ++power;  // only even ones are so large
  return static_cast<uint8_t>(sign | (mantissa < 8 ? mantissa : (power + 10) << 3 | (mantissa - 8)));
}

// One 128 x 128 block: rows first_row + row_of(0..127) of the matrix to half `half` of a record.
template <typename RowOf>
void pack_block(const Fp4AsFp8Matrix& m, int k, int first_row, int k_block, RowOf row_of, int half, uint8_t* record,
                float& base, PackReport& report) {
  const BlockExponents e = block_exponents(m, k, first_row, k_block, row_of, kLargestSpanAsFp8, report);
  base = e.base();
  for (int row = 0; row < kBlock; ++row) {
    const uint8_t* source = m.codes + static_cast<size_t>(first_row + row_of(row)) * (k / 2) + k_block * (kBlock / 2);
    for (int place = 0; place < kBlock; ++place) {
      const int at = k_of_place(place), code = at % 2 ? source[at / 2] >> 4 : source[at / 2] & 15;
      const int exponent = std::max(e.of[row][at / 32] - e.largest + 6, -8);  // below: reported
      record[swizzled_byte(half * kBlock + row, place)] = e4m3_of(code, exponent);
    }
  }
}

template <typename RowOf>
void pack_block(const Fp4Matrix& m, int k, int first_row, int k_block, RowOf row_of, int half, uint8_t* record,
                float& base, PackReport& report) {
  const BlockExponents exponents = block_exponents(m, k, first_row, k_block, row_of, kLargestSpan, report);
  base = exponents.base();
  for (int slab = 0; slab < 2; ++slab) {
    uint8_t* codes_out = record + (2 * half + slab) * kSlabCodeBytes;
    uint8_t* offsets_out = record + 4 * kSlabCodeBytes + (2 * half + slab) * kSlabOffsetBytes;
    for (int row = 0; row < kSlabRows; ++row)
      for (int g = 0; g < kGroups; ++g) {
        const int e = exponents.of[slab * kSlabRows + row][g];
        offsets_out[offset_byte(row, g)] =
            static_cast<uint8_t>(e < 0 ? 0 : std::max(e - exponents.largest + kLargestSpan, 0));
      }
    for (int thread = 0; thread < 128; ++thread)
      for (int i = 0; i < 8; ++i) {
        const CodeWord w = code_word(thread, i);
        const size_t source = first_row + row_of(slab * kSlabRows + w.row);
        const uint8_t* row = m.codes + source * (k / 2) + k_block * (kBlock / 2);
        uint16_t quad[2];
        std::memcpy(&quad[0], row + k_of_place(w.place) / 2, 2);
        std::memcpy(&quad[1], row + k_of_place(w.place + 16) / 2, 2);
        const uint32_t word = arrange_codes(quad[0], quad[1]);
        std::memcpy(codes_out + w.byte, &word, 4);
      }
  }
}

template <typename RowOf>
void pack_block(const Fp8Matrix& m, int k, int first_row, int k_block, RowOf row_of, int half, uint8_t* record,
                float& base, PackReport& report) {
  const uint8_t scale = m.scales[static_cast<size_t>(first_row / kBlock) * (k / kBlock) + k_block];
  int64_t nans = scale == 255;
  base = std::ldexp(1.0f, scale - 127);
  for (int row = 0; row < kBlock; ++row) {
    const uint8_t* source = m.values + static_cast<size_t>(first_row + row_of(row)) * k + k_block * kBlock;
    for (int place = 0; place < kBlock; ++place) {
      const uint8_t value = source[k_of_place(place)];
      nans += (value & 0x7f) == 0x7f;
      record[swizzled_byte(half * kBlock + row, place)] = value;
    }
  }
  report.nans += nans;
  if (nans) report.blame(first_row, k_block * kBlock, 0);
}

constexpr int record_bytes_of(const Fp4Matrix*) { return kFp4RecordBytes; }
constexpr int record_bytes_of(const Fp4AsFp8Matrix*) { return kFp8RecordBytes; }
constexpr int record_bytes_of(const Fp8Matrix*) { return kFp8RecordBytes; }

}  // namespace detail

// Record rows [first, last) of one matrix [n, k] (all: 0, n/256), so that callers may share the work between threads.
// records and bases point to the start of the matrix's own.
template <typename Matrix>
PackReport pack_rows(const Matrix& m, int k, int first, int last, uint8_t* records, float* bases) {
  const int k_blocks = k / kBlock;
  PackReport report;
  for (int r = first; r < last; ++r)
    for (int kb = 0; kb < k_blocks; ++kb)
      for (int half = 0; half < 2; ++half)
        detail::pack_block(
            m, k, r * kRecordRows + half * kBlock, kb, [](int row) { return row; }, half,
            records + (static_cast<size_t>(r) * k_blocks + kb) * detail::record_bytes_of(&m),
            bases[(static_cast<size_t>(r) * 2 + half) * block_stride(k) + kb], report);
  return report;
}

// The same for a gate and an up matrix [n/2, k] each: n/256 record rows, one per 128 hidden units.
template <typename Matrix>
PackReport pack_gate_up_rows(const Matrix& gate, const Matrix& up, int k, int first, int last, uint8_t* records,
                             float* bases) {
  const int k_blocks = k / kBlock;
  PackReport report;
  for (int r = first; r < last; ++r)
    for (int kb = 0; kb < k_blocks; ++kb)
      for (int half = 0; half < 2; ++half)
        detail::pack_block(half ? up : gate, k, r * kBlock, kb, hidden_of_row, half,
                           records + (static_cast<size_t>(r) * k_blocks + kb) * detail::record_bytes_of(&gate),
                           bases[(static_cast<size_t>(r) * 2 + half) * block_stride(k) + kb], report);
  return report;
}

}  // namespace plumb::kernels::grouped_linear
