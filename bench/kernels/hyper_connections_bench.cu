// Speed of hyper-connections at 16,384 rows of 4 x 4,096, the whole call and each pass; and of a decoding step.
// Bytes are those that a pass must move; "call, least" counts what a single pass over the streams would.
// usage: hyper_connections_bench [RESULT.json]
#include "bench_support.cuh"
#include "kernels/hyper_connections/hyper_connections.h"

using namespace plumb::kernels;
using namespace plumb::bench;

namespace {

constexpr int kWidth = 4096;

struct Case {
  int rows;
  Array<uint16_t> streams, out, d_next, d_x;
  Array<uint16_t> next, x, d_out, d_streams;
  Array<float> fn, base, scale, norm, finished;
  Array<float> coefficients, mix, rho, scales, d_coefficients, d_fn, d_base, d_scale;
  Array<uint8_t> values, workspace, back_workspace;
  HyperBoundary boundary;
  HyperPostBackward post;
  HyperPreBackward pre;
  explicit Case(int rows)
      : rows(rows),
        streams(size_t(rows) * 4 * kWidth, 1, 1),
        out(size_t(rows) * kWidth, 1, 2),
        d_next(streams.size(), 1, 3),
        d_x(out.size(), 1, 4),
        next(streams.size()),
        x(out.size()),
        d_out(out.size()),
        d_streams(streams.size()),
        fn(size_t(24) * 4 * kWidth, 0.01f, 5),
        base(24, 1, 6),
        scale(3, 1, 7),
        norm(kWidth, 0.1f, 8, 1),
        finished(size_t(rows) * 24, 0.1f, 9, 0.5f),
        coefficients(size_t(rows) * 24),
        mix(coefficients.size()),
        rho(rows),
        scales(size_t(rows) * 32),
        d_coefficients(coefficients.size()),
        d_fn(fn.size()),
        d_base(24),
        d_scale(3),
        values(x.size()),
        workspace(hyper_boundary_workspace(rows, kWidth)),
        back_workspace(hyper_pre_backward_workspace(rows, kWidth, true)) {
    const HyperMapping map{fn.get(), base.get(), scale.get(), 24, 20, 1e-6f, 1e-6f};
    boundary = {streams.get(), out.get(),    finished.get(),  next.get(), map,     coefficients.get(),
                mix.get(),     rho.get(),    norm.get(),      1e-6f,      nullptr, x.get(),
                values.get(),  scales.get(), workspace.get(), rows,       kWidth};
    post = {d_next.get(), streams.get(), out.get(), finished.get(), d_out.get(), d_coefficients.get(), rows, kWidth};
    pre = {d_next.get(),
           streams.get(),
           d_x.get(),
           coefficients.get(),
           mix.get(),
           rho.get(),
           map,
           norm.get(),
           1e-6f,
           d_coefficients.get(),
           d_streams.get(),
           nullptr,
           nullptr,
           nullptr,
           back_workspace.get(),
           rows,
           kWidth};
  }
};

}  // namespace

int main(int argc, char** argv) {
  Report report("hyper_connections");
  {
    Case c(16384);
    const double unit = 2.0 * c.rows * kWidth;  // bytes of one bf16 row of width, all tokens
    double ms = cold_ms(1, [&](int, cudaStream_t stream) { check(hyper_boundary(c.boundary, stream)); });
    report.cold("boundary (3 kernels), bytes of its passes", unit * (4 + 1 + 4 + 4 + 1.5), ms);
    report.cold("boundary, least bytes", unit * (4 + 1 + 4 + 1.5), ms);
    HyperBoundary no_post = c.boundary;
    no_post.out = nullptr, no_post.finished = nullptr, no_post.next = nullptr;
    ms = cold_ms(1, [&](int, cudaStream_t stream) { check(hyper_boundary(no_post, stream)); });
    report.cold("boundary without post, bytes of its passes", unit * (4 + 4 + 1.5), ms);
    ms = cold_ms(1, [&](int, cudaStream_t stream) { check(hyper_post_backward(c.post, stream)); });
    report.cold("post backward", unit * (4 + 4 + 1 + 1), ms);
    ms = cold_ms(1, [&](int, cudaStream_t stream) { check(hyper_pre_backward(c.pre, stream)); });
    report.cold("pre backward (3 kernels), mapping frozen", unit * (4 + 1 + 4 + 4 + 1 + 4), ms);
    HyperPreBackward trained = c.pre;
    trained.d_fn = c.d_fn.get(), trained.d_base = c.d_base.get(), trained.d_scale = c.d_scale.get();
    ms = cold_ms(1, [&](int, cudaStream_t stream) { check(hyper_pre_backward(trained, stream)); });
    report.cold("pre backward, mapping trained", unit * (4 + 1 + 4 + 4 + 1 + 4 + 4), ms);
  }
  for (const int rows : {1, 64, 256}) {
    Case c(rows);
    constexpr int kLaunches = 50;
    const double ms = median_ms(9,
                                [&] {
                                  for (int i = 0; i < kLaunches; ++i) check(hyper_boundary(c.boundary, nullptr));
                                }) /
                      kLaunches;
    report.time("boundary, " + std::to_string(rows) + " rows", ms);
  }
  report.write(argc, argv);
}
