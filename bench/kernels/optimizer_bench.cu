// Speed of the optimizer over the LoRA parameters of a large run: 43 layers x 10 matrices of 65,536 and 11,008 experts'
// of 49,152 (0.57 G parameters); of Muon over all experts' matrices of a layer, and over square ones.
// usage: optimizer_bench [RESULT.json]
#include "bench_support.cuh"
#include "kernels/optimizer/muon.h"
#include "kernels/optimizer/optimizer.h"

namespace {

using namespace plumb::bench;
using namespace plumb::kernels::optimizer;

void adamw_runs(Report& report) {
  const size_t total = 430 * size_t{65536} + 11008 * size_t{49152};
  const Array<float> weight(total, 0.02f, 1), gradient(total, 1e-4f, 2), first(total, 1e-5f, 3), second(total, 0, 4);
  std::vector<Tensor> tensors;
  for (size_t at = 0; at < total;) {
    const size_t count = tensors.size() < 430 ? 65536 : 49152;
    tensors.push_back(
        {weight.get() + at, gradient.get() + at, first.get() + at, second.get() + at, static_cast<int64_t>(count)});
    at += count;
  }
  const auto pieces = pieces_of(tensors);
  const int count = static_cast<int>(pieces.size());
  const Array<Tensor> table(pieces);
  const Array<double> workspace(count), norm(1);
  report.bytes("gradient norm, 0.57 G parameters", 4.0 * total,
               median_ms(9, [&] { gradient_norm(table.get(), count, 1, workspace.get(), norm.get(), nullptr); }));
  AdamW options;
  options.learning_rate = 1e-4, options.largest_norm = 1;
  report.bytes("AdamW, 0.57 G parameters, gradients cleared", 32.0 * total,
               median_ms(9, [&] { adamw(table.get(), count, options, norm.get(), true, nullptr); }));
}

// Operations are counted as the formulas have them, without the symmetry that the kernels use.
void muon_run(Report& report, int count, int rows, int columns, int at_once) {
  const size_t total = size_t(count) * rows * columns;
  const Array<float> weight(total, 0.02f, 1), gradient(total, 1e-4f, 2), momentum(total, 1e-4f, 3);
  const Matrices m{weight.get(), gradient.get(), momentum.get(), count, rows, columns};
  const Array<uint8_t> workspace(muon_bytes(m, at_once));
  Muon options;
  options.learning_rate = 1e-4;
  const double side = std::min(rows, columns), length = std::max(rows, columns);
  report.product(
      "Muon, " + std::to_string(count) + " x [" + std::to_string(rows) + ", " + std::to_string(columns) + "]",
      10.0 * count * (4 * side * side * length + 2 * side * side * side),
      measure([&] { muon(m, options, nullptr, at_once, workspace.get(), nullptr); }, 5));
}

}  // namespace

int main(int argc, char** argv) {
  Report report("optimizer");
  adamw_runs(report);
  muon_run(report, 256, 2048, 4096, 32), muon_run(report, 256, 4096, 2048, 32), muon_run(report, 8, 4096, 4096, 8);
  report.write(argc, argv);
}
