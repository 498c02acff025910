// Speed of norms, rotation and storage forms at 16,384 rows. usage: norm_bench [RESULT.json]
#include "bench_support.cuh"
#include "kernels/norm/norm.h"
#include "kernels/rotary/rotary.h"

using namespace plumb::kernels;
using namespace plumb::bench;

int main(int argc, char** argv) {
  Report report("norm");
  const int rows = 16384;
  for (const int width : {1024, 4096}) {
    Array<uint16_t> x(size_t(rows) * width, 1, 1), d(x.size(), 1, 2);
    Array<float> weight(width, 0.1f, 3, 1);
    Array<uint16_t> y(x.size());
    Array<uint8_t> values(x.size()), workspace(rms_norm_backward_workspace(rows, width));
    Array<float> scales(size_t(rows) * width / 128), dw(width);
    const double bytes = 2.0 * x.size();
    const std::string name = "norm of " + std::to_string(width);
    double ms = median_ms(11, [&] {
      check(rms_norm({x.get(), weight.get(), y.get(), values.get(), scales.get(), rows, width, 1e-6f}, nullptr));
    });
    report.bytes(name + " with FP8 codes", bytes * 2.5, ms);
    ms = median_ms(11, [&] {
      check(
          rms_norm_backward({x.get(), d.get(), weight.get(), y.get(), nullptr, nullptr, rows, width, 1e-6f}, nullptr));
    });
    report.bytes(name + ", backward", bytes * 3, ms);
    ms = median_ms(11, [&] {
      check(rms_norm_backward({x.get(), d.get(), weight.get(), y.get(), dw.get(), workspace.get(), rows, width, 1e-6f},
                              nullptr));
    });
    report.bytes(name + ", backward with weight", bytes * 3, ms);
  }
  std::vector<int> positions(rows);
  std::vector<float> frequencies(32);
  for (int r = 0; r < rows; ++r) positions[r] = r;
  for (int j = 0; j < 32; ++j) frequencies[j] = 1.0f / (1 << j / 2);
  Array<int> position(positions);
  Array<float> frequency(frequencies);
  Array<float2> table(size_t(rows) * 32);
  report.time("rotary table",
              median_ms(11, [&] { check(rotary_table(position.get(), frequency.get(), rows, table.get(), nullptr)); }));
  struct Line {
    const char* what;
    int vectors, width;
    VectorNorm norm;
    VectorStorage storage;
  };
  for (const Line& l :
       {Line{"query heads: norm, rotation", 64, 512, VectorNorm::plain, VectorStorage::plain},
        Line{"keys: norm, rotation, FP8", 1, 512, VectorNorm::weighted, VectorStorage::fp8},
        Line{"index queries: rotation, Hadamard, FP4", 64, 128, VectorNorm::none, VectorStorage::fp4},
        Line{"index keys: norm, rotation, Hadamard, FP4", 1, 128, VectorNorm::weighted, VectorStorage::fp4},
        Line{"index queries: rotation, Hadamard, records", 64, 128, VectorNorm::none, VectorStorage::fp4_record}}) {
    Array<uint16_t> x(size_t(rows) * l.vectors * l.width, 1, 1), d(x.size(), 1, 2);
    Array<float> weight(l.width, 0.1f, 3, 1);
    Array<uint16_t> y(x.size());
    const bool weighted = l.norm == VectorNorm::weighted;
    double ms = median_ms(11, [&] {
      check(finish_vectors({x.get(), weighted ? weight.get() : nullptr, table.get(), nullptr, y.get(), rows, l.vectors,
                            l.width, l.norm, l.storage, 1e-6f},
                           nullptr));
    });
    report.bytes(l.what, (l.storage == VectorStorage::fp4_record ? 3.125 : 4.0) * x.size(), ms);
    ms = median_ms(11, [&] {
      check(finish_vectors_backward({x.get(), d.get(), weighted ? weight.get() : nullptr, table.get(), y.get(), nullptr,
                                     nullptr, rows, l.vectors, l.width, l.norm, l.storage, 1e-6f},
                                    nullptr));
    });
    report.bytes(std::string(l.what) + ", backward", (l.norm == VectorNorm::none ? 4.0 : 6.0) * x.size(), ms);
    if (l.vectors == 64 && l.width == 512) {
      ms = median_ms(11, [&] { check(rotate_tails(y.get(), table.get(), rows, 64, 512, true, nullptr)); });
      report.bytes("attention outputs: tails rotated back, in place", 2.0 * 128 * 64 * rows, ms);
    }
  }
  report.write(argc, argv);
}
