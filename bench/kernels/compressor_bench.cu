// Speed of pooling compressed entries at 16,384 rows. usage: compressor_bench [RESULT.json]
#include "bench_support.cuh"
#include "kernels/compressor/compressor.h"

using namespace plumb::kernels;
using namespace plumb::bench;

int main(int argc, char** argv) {
  Report report("compressor");
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
    Array<int> sources(source), begin(lists.begin), use(lists.use);
    Array<float> kv(size_t(rows) * row_width, 1, 1), gate(kv.size(), 1, 2), ape(size_t(l.ratio) * row_width, 1, 3);
    Array<uint16_t> d_entries(size_t(entries) * l.width, 1, 4);
    Array<uint16_t> out(d_entries.size());
    Array<float> total(out.size()), value(out.size()), d_kv(kv.size()), d_gate(kv.size()), d_ape(ape.size());
    const CompressedPooling p{kv.get(), gate.get(), nullptr, nullptr, ape.get(), sources.get(),
                              rows,     entries,    l.ratio, slots,   l.width};
    Array<uint8_t> workspace(pool_entries_backward_workspace(p));
    const double projected = 8.0 * kv.size(), small = 1.0 * out.size();
    double ms = median_ms(11, [&] { check(pool_entries(p, out.get(), nullptr, nullptr, nullptr)); });
    report.bytes(l.what, projected + 2 * small, ms);
    ms = median_ms(11, [&] { check(pool_entries(p, out.get(), total.get(), value.get(), nullptr)); });
    report.bytes(std::string(l.what) + ", kept for backward", projected + 10 * small, ms);
    CompressedPoolingBackward b{p,          total.get(),  value.get(), d_entries.get(), {begin.get(), use.get()},
                                d_kv.get(), d_gate.get(), nullptr,     workspace.get()};
    ms = median_ms(11, [&] { check(pool_entries_backward(b, nullptr)); });
    report.bytes(std::string(l.what) + ", backward", 2 * projected + 10 * small, ms);
    b.d_ape = d_ape.get();
    ms = median_ms(11, [&] { check(pool_entries_backward(b, nullptr)); });
    report.bytes(std::string(l.what) + ", backward with ape", 3 * projected + 20 * small, ms);
  }
  report.write(argc, argv);
}
