// Speed of norms, rotation and storage forms at 16,384 rows. usage: norm_bench [RESULT.json]
#include "gpu_bench.cuh"
#include "kernels/norm/norm.h"
#include "kernels/rotary/rotary.h"

using namespace plumb::kernels;
using namespace gpu_bench;

int main(int argc, char** argv) {
  Report report("norm", argc > 1 ? argv[1] : nullptr);
  const int rows = 16384;
  for (const int width : {1024, 4096}) {
    Normal<Bf16> x(size_t(rows) * width, 1), d(x.count, 2);
    Normal<float> weight(width, 3, 0.1f, 1);
    Buffer<Bf16> y(x.count);
    Buffer<uint8_t> values(x.count), workspace(rms_norm_backward_workspace(rows, width));
    Buffer<float> scales(size_t(rows) * width / 128), dw(width);
    const double bytes = 2.0 * x.count;
    const std::string name = "norm of " + std::to_string(width);
    double ms = median_ms(11, [&](int) {
      check(rms_norm({x.data, weight.data, y.data, values.data, scales.data, rows, width, 1e-6f}, nullptr));
    });
    report.bytes((name + " with FP8 codes").c_str(), ms, bytes * 2.5);
    ms = median_ms(11, [&](int) {
      check(rms_norm_backward({x.data, d.data, weight.data, y.data, nullptr, nullptr, rows, width, 1e-6f}, nullptr));
    });
    report.bytes((name + ", backward").c_str(), ms, bytes * 3);
    ms = median_ms(11, [&](int) {
      check(rms_norm_backward({x.data, d.data, weight.data, y.data, dw.data, workspace.data, rows, width, 1e-6f},
                              nullptr));
    });
    report.bytes((name + ", backward with weight").c_str(), ms, bytes * 3);
  }
  std::vector<int> positions(rows);
  std::vector<float> frequencies(32);
  for (int r = 0; r < rows; ++r) positions[r] = r;
  for (int j = 0; j < 32; ++j) frequencies[j] = 1.0f / (1 << j / 2);
  Buffer<int> position(positions);
  Buffer<float> frequency(frequencies);
  Buffer<float2> table(size_t(rows) * 32);
  report.time("rotary table", median_ms(11, [&](int) {
                check(rotary_table(position.data, frequency.data, rows, table.data, nullptr));
              }));
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
        Line{"index keys: norm, rotation, Hadamard, FP4", 1, 128, VectorNorm::weighted, VectorStorage::fp4}}) {
    Normal<Bf16> x(size_t(rows) * l.vectors * l.width, 1), d(x.count, 2);
    Normal<float> weight(l.width, 3, 0.1f, 1);
    Buffer<Bf16> y(x.count);
    const bool weighted = l.norm == VectorNorm::weighted;
    double ms = median_ms(11, [&](int) {
      check(finish_vectors({x.data, weighted ? weight.data : nullptr, table.data, nullptr, y.data, rows, l.vectors,
                            l.width, l.norm, l.storage, 1e-6f},
                           nullptr));
    });
    report.bytes(l.what, ms, 4.0 * x.count);
    ms = median_ms(11, [&](int) {
      check(finish_vectors_backward({x.data, d.data, weighted ? weight.data : nullptr, table.data, y.data, nullptr,
                                     nullptr, rows, l.vectors, l.width, l.norm, l.storage, 1e-6f},
                                    nullptr));
    });
    report.bytes((std::string(l.what) + ", backward").c_str(), ms, (l.norm == VectorNorm::none ? 4.0 : 6.0) * x.count);
    if (l.vectors == 64 && l.width == 512) {
      ms = median_ms(11, [&](int) { check(rotate_tails(y.data, table.data, rows, 64, 512, true, nullptr)); });
      report.bytes("attention outputs: tails rotated back, in place", ms, 2.0 * 128 * 64 * rows);
    }
  }
  return report.write();
}
