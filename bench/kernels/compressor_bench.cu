// Speed of pooling compressed entries at 16,384 rows. usage: compressor_bench [RESULT.json]
#include "gpu_bench.cuh"
#include "kernels/compressor/compressor.h"

using namespace plumb::kernels;
using namespace gpu_bench;

int main(int argc, char** argv) {
  Report report("compressor", argc > 1 ? argv[1] : nullptr);
  const int rows = 16384;
  struct Line {
    const char* what;
    int ratio, width;
  };
  for (const Line& l : {Line{"ratio 4, width 512", 4, 512}, Line{"ratio 4, width 128 (index)", 4, 128},
                        Line{"ratio 128, width 512", 128, 512}}) {
    const int slots = l.ratio == 4 ? 8 : 128, entries = rows / l.ratio, row_width = slots / l.ratio * l.width;
    std::vector<int> source;
    for (int e = 0; e < entries; ++e)
      for (int s = 0; s < slots; ++s) source.push_back(std::max(-1, (e + 1) * l.ratio - slots + s));
    const SlotUseLists lists = transpose_sources(source, rows, l.ratio, slots);
    Buffer<int> sources(source), begin(lists.begin), use(lists.use);
    Normal<float> kv(size_t(rows) * row_width, 1), gate(kv.count, 2), ape(size_t(l.ratio) * row_width, 3);
    Normal<Bf16> d_entries(size_t(entries) * l.width, 4);
    Buffer<Bf16> out(d_entries.count);
    Buffer<float> total(out.count), value(out.count), d_kv(kv.count), d_gate(kv.count), d_ape(ape.count);
    const CompressedPooling p{kv.data, gate.data, nullptr, nullptr, ape.data, sources.data,
                              rows,    entries,   l.ratio, slots,   l.width};
    Buffer<uint8_t> workspace(pool_entries_backward_workspace(p));
    const double projected = 8.0 * kv.count, small = 1.0 * out.count;
    double ms = median_ms(11, [&](int) { check(pool_entries(p, out.data, nullptr, nullptr, nullptr)); });
    report.bytes(l.what, ms, projected + 2 * small);
    ms = median_ms(11, [&](int) { check(pool_entries(p, out.data, total.data, value.data, nullptr)); });
    report.bytes((std::string(l.what) + ", kept for backward").c_str(), ms, projected + 10 * small);
    CompressedPoolingBackward b{p,         total.data,  value.data, d_entries.data, {begin.data, use.data},
                                d_kv.data, d_gate.data, nullptr,    workspace.data};
    ms = median_ms(11, [&](int) { check(pool_entries_backward(b, nullptr)); });
    report.bytes((std::string(l.what) + ", backward").c_str(), ms, 2 * projected + 10 * small);
    b.d_ape = d_ape.data;
    ms = median_ms(11, [&](int) { check(pool_entries_backward(b, nullptr)); });
    report.bytes((std::string(l.what) + ", backward with ape").c_str(), ms, 3 * projected + 20 * small);
  }
  return report.write();
}
