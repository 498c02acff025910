// Data for the tests of the grouped linear kernels: random weights in the checkpoint's formats (packed, and plain for
// the oracles), quantised activations, plans.
#pragma once
#include <numeric>

#include "device_data.cuh"
#include "kernels/grouped_linear/grouped_linear.h"

namespace plumb::kernels::grouped_linear {

// ---- Weights: in the checkpoint's format, packed, and as plain e4m3 with one scale a 128 x 128 block ---------------
struct Matrices {
  WeightFormat format;
  int groups, n, k;
  bool gate_up;
  std::vector<uint8_t> data, scales;  // FP4: codes [g, n, k/2], [g, n, k/32]; FP8: [g, n, k], [g, n/128, k/128]
  std::vector<uint8_t> plain;         // [g, n, k] e4m3, rows in record order
  std::vector<float> bases;           // [g, n/128, block_stride(k)]
  std::vector<uint8_t> records;

  Weights on_device(const Buffer<uint8_t>& r, const Buffer<float>& b) const {
    return {format, groups, n, k, r.get(), b.get()};
  }
  // Row of the checkpoint's [n, k] (gates, then ups) that lies at a row of the records.
  int source_row(int row) const {
    return gate_up ? row / 128 % 2 * (n / 2) + row / 256 * 128 + hidden_of_row(row % 128) : row;
  }
};

template <typename Matrix>
void pack(Matrices& w, int group, size_t data_row, size_t scale_row, int scale_rows) {
  const int first_half = w.gate_up ? w.n / 2 : w.n;
  const auto at = [&](int row) {
    return Matrix{w.data.data() + (static_cast<size_t>(group) * w.n + row) * data_row,
                  w.scales.data() + (static_cast<size_t>(group) * w.n + row) / scale_rows * scale_row};
  };
  const size_t record = record_bytes(w.format), blocks = w.k / kBlock;
  uint8_t* records = w.records.data() + group * (w.n / kRecordRows) * blocks * record;
  float* bases = w.bases.data() + group * (w.n / kBlock) * block_stride(w.k);
  const PackReport report = w.gate_up
                                ? pack_gate_up_rows(at(0), at(first_half), w.k, 0, w.n / kRecordRows, records, bases)
                                : pack_rows(at(0), w.k, 0, w.n / kRecordRows, records, bases);
  if (!report.ok()) throw std::runtime_error(describe(report));
}

inline Matrices random_weights(WeightFormat format, int groups, int n, int k, bool gate_up, int seed) {
  Matrices w{format, groups, n, k, gate_up, {}, {}, {}, {}, {}};
  std::mt19937 random(seed);
  const size_t count = static_cast<size_t>(groups) * n * k;
  w.plain.resize(count), w.bases.resize(groups * n / kBlock * block_stride(k));
  w.records.resize(count / kRecordRows / kBlock * record_bytes(format));
  if (format == WeightFormat::fp4) {
    w.data.resize(count / 2), w.scales.resize(count / 32);
    for (auto& c : w.data) c = static_cast<uint8_t>(random());
    for (auto& s : w.scales) s = static_cast<uint8_t>(113 + random() % 5 + random() % 4 + random() % 5);  // span 11
    for (int g = 0; g < groups; ++g) pack<Fp4Matrix>(w, g, k / 2, k / 32, 1);
  } else {
    w.data.resize(count), w.scales.resize(count / kBlock / kBlock);
    std::normal_distribution<float> normal(0, 60);
    for (auto& v : w.data) v = float_to_e4m3(normal(random));
    for (auto& s : w.scales) s = static_cast<uint8_t>(112 + random() % 8);
    for (int g = 0; g < groups; ++g) pack<Fp8Matrix>(w, g, k, k / kBlock, kBlock);
  }
  // The plain form, from the formats' definitions alone.
  for (int row = 0; row < groups * n; ++row) {
    const size_t source = static_cast<size_t>(row / n) * n + w.source_row(row % n);
    for (int kk = 0; kk < k; ++kk) {
      uint8_t& out = w.plain[static_cast<size_t>(row) * k + kk];
      const float base = w.bases[row / kBlock * block_stride(k) + kk / kBlock];
      if (format == WeightFormat::fp8) {
        out = w.data[source * k + kk];
      } else {
        const uint8_t byte = w.data[(source * k + kk) / 2];
        const float value =
            e2m1_to_float(kk % 2 ? byte >> 4 : byte & 15) * e8m0_to_float(w.scales[(source * k + kk) / 32]);
        out = float_to_e4m3(value / base);
        if (e4m3_to_float(out) * base != value) throw std::runtime_error("the test's weights are not exact");
      }
    }
  }
  return w;
}

// The widened weights [groups * n, k], in record order.
inline std::vector<float> widened(const Matrices& w) {
  std::vector<float> values(w.plain.size());
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = e4m3_to_float(w.plain[i]) * w.bases[i / w.k / kBlock * block_stride(w.k) + i % w.k / kBlock];
  return values;
}

// ---- Activations ---------------------------------------------------------------------------------------------------
struct Quantised {
  Buffer<uint8_t> values;
  Buffer<float> scales;
  int rows;
  Quantised(const std::vector<uint16_t>& x, int rows_, int k)
      : values(static_cast<size_t>(rows_) * k), scales(static_cast<size_t>(rows_) * block_stride(k)), rows(rows_) {
    const Buffer<uint16_t> source(x);
    quantise_rows(source.get(), nullptr, rows, k, values.get(), scales.get(), nullptr);
    check_cuda(cudaDeviceSynchronize(), "quantise_rows");
  }
  Activations get() const { return {values.get(), scales.get(), rows}; }
};

inline std::vector<int> first_rows(const std::vector<int>& counts) {
  std::vector<int> first(counts.size() + 1);
  std::partial_sum(counts.begin(), counts.end(), first.begin() + 1);
  return first;
}

struct PlanOnDevice {
  Buffer<int> first;
  Buffer<uint4> workspace;
  Plan plan;
  PlanOnDevice(const std::vector<int>& counts, int rows, int n, int width)
      : first(first_rows(counts)),
        workspace(plan_bytes(static_cast<int>(counts.size()), rows, n, width) / sizeof(uint4) + 1),
        plan{static_cast<int>(counts.size()), rows, n, width, workspace.get()} {
    make_plan(first.get(), plan, nullptr);
  }
};

}  // namespace plumb::kernels::grouped_linear
