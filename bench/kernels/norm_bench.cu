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
    const size_t count = size_t(rows) * width;
    const double bytes = 2.0 * count;
    const int copies = cold_copies(3 * bytes);
    Array<uint16_t> x(count * copies, 1, 1), d(x.size(), 1, 2);
    Array<float> weight(width, 0.1f, 3, 1);
    Array<uint16_t> y(x.size());
    Array<uint8_t> values(x.size()), workspace(rms_norm_backward_workspace(rows, width));
    Array<float> scales(x.size() / 128), dw(width);
    const std::string name = "norm of " + std::to_string(width);
    double ms = cold_ms(copies, [&](int i, cudaStream_t stream) {
      check(rms_norm({x.get() + i * count, weight.get(), y.get() + i * count, values.get() + i * count,
                      scales.get() + i * count / 128, rows, width, 1e-6f},
                     stream));
    });
    report.cold(name + " with FP8 codes", bytes * 2.5, ms);
    const auto backward = [&](float* d_weight) {
      return cold_ms(copies, [&](int i, cudaStream_t stream) {
        check(rms_norm_backward({x.get() + i * count, d.get() + i * count, weight.get(), y.get() + i * count, d_weight,
                                 d_weight ? workspace.get() : nullptr, rows, width, 1e-6f},
                                stream));
      });
    };
    report.cold(name + ", backward", bytes * 3, backward(nullptr));
    report.cold(name + ", backward with weight", bytes * 3, backward(dw.get()));
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
        Line{"index keys: norm, rotation, Hadamard, records", 1, 128, VectorNorm::weighted, VectorStorage::fp4_record},
        Line{"index queries: rotation, Hadamard, records", 64, 128, VectorNorm::none, VectorStorage::fp4_record}}) {
    const size_t count = size_t(rows) * l.vectors * l.width;
    const double in = 2.0 * count, out = l.storage == VectorStorage::fp4_record ? 1.125 * count : in;
    const int copies = cold_copies(in + out);
    Array<uint16_t> x(count * copies, 1, 1), d(x.size(), 1, 2);
    Array<float> weight(l.width, 0.1f, 3, 1);
    Array<uint16_t> y(x.size());
    const float* w = l.norm == VectorNorm::weighted ? weight.get() : nullptr;
    double ms = cold_ms(copies, [&](int i, cudaStream_t stream) {
      check(finish_vectors({x.get() + i * count, w, table.get(), nullptr, y.get() + i * count, rows, l.vectors, l.width,
                            l.norm, l.storage, 1e-6f},
                           stream));
    });
    report.cold(l.what, in + out, ms);
    ms = cold_ms(copies, [&](int i, cudaStream_t stream) {
      check(finish_vectors_backward({x.get() + i * count, d.get() + i * count, w, table.get(), y.get() + i * count,
                                     nullptr, nullptr, rows, l.vectors, l.width, l.norm, l.storage, 1e-6f},
                                    stream));
    });
    report.cold(std::string(l.what) + ", backward", (l.norm == VectorNorm::none ? 2 : 3) * in, ms);
    if (l.vectors == 64 && l.width == 512) {
      ms = cold_ms(copies, [&](int i, cudaStream_t stream) {
        check(rotate_tails(y.get() + i * count, table.get(), rows, 64, 512, true, stream));
      });
      report.cold("attention outputs: tails rotated back, in place", 2.0 * 128 * 64 * rows, ms);
    }
  }
  report.write(argc, argv);
}
