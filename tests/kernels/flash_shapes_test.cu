// Every matrix of a DeepSeek-V4-Flash layer in exactly its shape and format, forward and input gradient, for a decoded
// token and for more rows than a tile, against FP64 (docs/kernels/matrices.md is the list). Embedding, head and the mHC
// mapping have their shapes in rows_test, head_test and hyper_connections_test. About 30 s, most of it making weights.
#include "grouped_linear_data.cuh"
#include "kernels/row_linear/row_linear.h"

namespace plumb::kernels {
namespace {

constexpr int kRows[] = {1, 130};

// Products with packed weights: a tensor-core sum keeps about 13 bits below the largest of its addends, 2^-10 of the
// sum of magnitudes leaves room (grouped_linear_test.cu); bf16 rounds by 2^-9, 2^-8 at the edge of a binade.
void expect_forward(const std::vector<uint16_t>& got, const Reference& want, const char* name) {
  for (size_t i = 0; i < want.sum.size(); ++i)
    ASSERT_LE(std::fabs(value(got[i]) - want.sum[i]), want.magnitude[i] * 0x1p-10 + std::fabs(want.sum[i]) * 0x1p-8)
        << name << " element " << i;
}
// bf16 products: steps of 16 that truncate below the 24th bit.
void expect_gradient(const std::vector<uint16_t>& got, const Reference& want, int n, const char* name) {
  for (size_t i = 0; i < want.sum.size(); ++i)
    ASSERT_LE(std::fabs(value(got[i]) - want.sum[i]),
              want.magnitude[i] * (n / 16 + 2) * 0x1p-23 + std::fabs(want.sum[i]) * 0x1p-8)
        << name << " element " << i;
}

// Activations as the kernel reads them, [rows, k] in the natural order of K.
std::vector<float> widened(const grouped_linear::Quantised& x, int k) {
  using namespace grouped_linear;
  const auto values = x.values.host();
  const auto scales = x.scales.host();
  std::vector<float> out(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    const size_t row = i / k, block = i % k / kBlock;
    out[row * k + block * kBlock + k_of_place(static_cast<int>(i % kBlock))] =
        e4m3_to_float(values[i]) * scales[row * block_stride(k) + block];
  }
  return out;
}

void check_packed(const char* name, grouped_linear::WeightFormat format, int n, int k, bool gate_up = false) {
  using namespace grouped_linear;
  const Matrices w = random_weights(format, 1, n, k, gate_up, 1);
  const Buffer<uint8_t> records(w.records);
  const Buffer<float> bases(w.bases), weights(widened(w));
  for (const int rows : kRows) {
    const Quantised x(random_rows(rows, k, 2), rows, k);
    const Buffer<float> plain(widened(x, k));
    const PlanOnDevice forward({rows}, rows, n, best_width(rows, 1));
    Buffer<uint16_t> out(static_cast<size_t>(rows) * n), dx(static_cast<size_t>(rows) * k);
    linear(w.on_device(records, bases), x.get(), forward.plan, out.get(), nullptr);
    expect_forward(out.host(), reference_product<float, float>({plain.get(), k, 1}, {weights.get(), k, 1}, rows, n, k),
                   name);
    const Buffer<uint16_t> dy(random_rows(rows, n, 3));
    const PlanOnDevice backward({rows}, rows, k, 256);
    linear_backward_input(w.on_device(records, bases), dy.get(), backward.plan, dx.get(), nullptr);
    expect_gradient(dx.host(), reference_product<uint16_t, float>({dy.get(), n, 1}, {weights.get(), 1, k}, rows, k, n),
                    n, name);
  }
}
TEST(FlashShapes, Fp8) {
  using grouped_linear::WeightFormat;
  check_packed("attn.wq_a", WeightFormat::fp8, 1024, 4096);
  check_packed("attn.wq_b", WeightFormat::fp8, 32768, 1024);
  check_packed("attn.wkv", WeightFormat::fp8, 512, 4096);
  check_packed("attn.wo_b", WeightFormat::fp8, 4096, 8192);
  check_packed("attn.indexer.wq_b", WeightFormat::fp8, 8192, 1024);
  check_packed("ffn.shared_experts.w1 and w3", WeightFormat::fp8, 4096, 4096, true);
  check_packed("ffn.shared_experts.w2", WeightFormat::fp8, 4096, 2048);
  check_packed("mtp e_proj, h_proj", WeightFormat::fp8, 4096, 4096);
}
TEST(FlashShapes, Fp4) {
  using grouped_linear::WeightFormat;
  check_packed("ffn.experts.e.w1 and w3", WeightFormat::fp4, 4096, 4096, true);
  check_packed("ffn.experts.e.w2", WeightFormat::fp4, 4096, 2048);
}

// bf16 weights, FP32 results; truncations as above, and the additions of the parts of K.
void check_bf16(const char* name, int n, int k, int groups = 1) {
  const int outs = n * groups, ins = k * groups;
  const Buffer<uint16_t> data(random_bf16(static_cast<size_t>(outs) * k, 0.02f, 1));
  const row_linear::Weight w{data.get(), n, k, groups};
  for (const int rows : kRows) {
    const Buffer<uint16_t> x(random_rows(rows, ins, 2)), dy(random_rows(rows, outs, 3));
    Buffer<float> out(static_cast<size_t>(rows) * outs), dx(static_cast<size_t>(rows) * ins);
    Buffer<float> workspace(row_linear::workspace_bytes(rows, w) / sizeof(float));
    row_linear::linear(x.get(), rows, w, out.get(), workspace.get(), nullptr);
    row_linear::linear_backward_input(dy.get(), rows, w, dx.get(), nullptr);
    const auto y = out.host(), d = dx.host();
    for (int g = 0; g < groups; ++g) {
      const uint16_t* weights = data.get() + static_cast<size_t>(g) * n * k;
      const auto cut = [&](const std::vector<float>& all, int width) {
        std::vector<float> own;
        for (int r = 0; r < rows; ++r) {
          const auto first = all.begin() + (static_cast<size_t>(r) * groups + g) * width;
          own.insert(own.end(), first, first + width);
        }
        return own;
      };
      EXPECT_LE(worst_error(cut(y, n), reference_product<uint16_t, uint16_t>({x.get() + g * k, ins, 1}, {weights, k, 1},
                                                                             rows, n, k)),
                (k / 16 + 10) * 0x1p-23)
          << name << " group " << g;
      EXPECT_LE(worst_error(cut(d, k), reference_product<uint16_t, uint16_t>({dy.get() + g * n, outs, 1},
                                                                             {weights, 1, k}, rows, k, n)),
                (n / 16 + 10) * 0x1p-23)
          << name << " group " << g;
    }
  }
}
TEST(FlashShapes, Bf16) {
  check_bf16("ffn.gate", 256, 4096);
  check_bf16("attn.compressor of ratio 4", 1024, 4096);
  check_bf16("attn.compressor of ratio 128", 512, 4096);
  check_bf16("attn.indexer.compressor", 256, 4096);
  check_bf16("attn.indexer.weights_proj", 64, 4096);
  check_bf16("attn.wo_a, widened", 1024, 4096, 8);
}

}  // namespace
}  // namespace plumb::kernels
