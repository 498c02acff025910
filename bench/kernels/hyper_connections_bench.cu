// Speed of hyper-connections at 16,384 rows of 4 x 4,096, the whole call and each pass; and of a decoding step.
// Bytes are those that a pass must move; "call, least" counts what a single pass over the streams would.
// usage: hyper_connections_bench [RESULT.json]
#include "gpu_bench.cuh"
#include "kernels/hyper_connections/hyper_connections.h"

using namespace plumb::kernels;
using namespace gpu_bench;

namespace {

constexpr int kWidth = 4096;

struct Case {
  int rows;
  Normal<Bf16> streams, out, d_next, d_x;
  Buffer<Bf16> next, x, d_out, d_streams;
  Normal<float> fn, base, scale, norm, finished;
  Buffer<float> coefficients, mix, rho, scales, d_coefficients, d_fn, d_base, d_scale;
  Buffer<uint8_t> values, workspace, back_workspace;
  HyperBoundary boundary;
  HyperPostBackward post;
  HyperPreBackward pre;
  explicit Case(int rows)
      : rows(rows),
        streams(size_t(rows) * 4 * kWidth, 1),
        out(size_t(rows) * kWidth, 2),
        d_next(streams.count, 3),
        d_x(out.count, 4),
        next(streams.count),
        x(out.count),
        d_out(out.count),
        d_streams(streams.count),
        fn(size_t(24) * 4 * kWidth, 5, 0.01f),
        base(24, 6),
        scale(3, 7),
        norm(kWidth, 8, 0.1f, 1),
        finished(size_t(rows) * 24, 9, 0.1f, 0.5f),
        coefficients(size_t(rows) * 24),
        mix(coefficients.count),
        rho(rows),
        scales(size_t(rows) * 32),
        d_coefficients(coefficients.count),
        d_fn(fn.count),
        d_base(24),
        d_scale(3),
        values(x.count),
        workspace(hyper_boundary_workspace(rows, kWidth)),
        back_workspace(hyper_pre_backward_workspace(rows, kWidth, true)) {
    const HyperMapping map{fn.data, base.data, scale.data, 24, 20, 1e-6f, 1e-6f};
    boundary = {streams.data, out.data,    finished.data,  next.data, map,     coefficients.data,
                mix.data,     rho.data,    norm.data,      1e-6f,     nullptr, x.data,
                values.data,  scales.data, workspace.data, rows,      kWidth};
    post = {d_next.data, streams.data, out.data, finished.data, d_out.data, d_coefficients.data, rows, kWidth};
    pre = {d_next.data,
           streams.data,
           d_x.data,
           coefficients.data,
           mix.data,
           rho.data,
           map,
           norm.data,
           1e-6f,
           d_coefficients.data,
           d_streams.data,
           nullptr,
           nullptr,
           nullptr,
           back_workspace.data,
           rows,
           kWidth};
  }
};

}  // namespace

int main(int argc, char** argv) {
  Report report("hyper_connections", argc > 1 ? argv[1] : nullptr);
  {
    Case c(16384);
    const double unit = 2.0 * c.rows * kWidth;  // bytes of one bf16 row of width, all tokens
    double ms = median_ms(11, [&](int) { check(hyper_boundary(c.boundary, nullptr)); });
    report.bytes("boundary (3 kernels), bytes of its passes", ms, unit * (4 + 1 + 4 + 4 + 1.5));
    report.bytes("boundary, least bytes", ms, unit * (4 + 1 + 4 + 1.5));
    HyperBoundary no_post = c.boundary;
    no_post.out = nullptr, no_post.finished = nullptr, no_post.next = nullptr;
    ms = median_ms(11, [&](int) { check(hyper_boundary(no_post, nullptr)); });
    report.bytes("boundary without post, bytes of its passes", ms, unit * (4 + 4 + 1.5));
    ms = median_ms(11, [&](int) { check(hyper_post_backward(c.post, nullptr)); });
    report.bytes("post backward", ms, unit * (4 + 4 + 1 + 1));
    ms = median_ms(11, [&](int) { check(hyper_pre_backward(c.pre, nullptr)); });
    report.bytes("pre backward (3 kernels), mapping frozen", ms, unit * (4 + 1 + 4 + 4 + 1 + 4));
    HyperPreBackward trained = c.pre;
    trained.d_fn = c.d_fn.data, trained.d_base = c.d_base.data, trained.d_scale = c.d_scale.data;
    ms = median_ms(11, [&](int) { check(hyper_pre_backward(trained, nullptr)); });
    report.bytes("pre backward, mapping trained", ms, unit * (4 + 1 + 4 + 4 + 1 + 4 + 4));
  }
  for (const int rows : {1, 64, 256}) {
    Case c(rows);
    constexpr int kLaunches = 50;
    const double ms = median_ms(9,
                                [&](int) {
                                  for (int i = 0; i < kLaunches; ++i) check(hyper_boundary(c.boundary, nullptr));
                                }) /
                      kLaunches;
    report.time(("boundary, " + std::to_string(rows) + " rows").c_str(), ms);
  }
  return report.write();
}
