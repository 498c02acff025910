// Hyper-connections against plain FP64 code on the CPU; gradients against finite differences of that code, along random
// directions; and the bits: a row alone and in company, repeats.
#include <cuda_fp8.h>

#include <functional>

#include "device_data.cuh"
#include "kernels/hyper_connections/hyper_connections.h"

namespace plumb::kernels {
namespace {

using Vector = std::vector<double>;

constexpr double kEps = 1e-6;
constexpr int kIterations = 20;

// ---- the formulas, of one token ----
struct Weights {
  int width, outputs;
  std::vector<float> fn, base, scale, norm;
  Weights(int width, int outputs) : width(width), outputs(outputs) {
    fn = random_floats(static_cast<size_t>(outputs) * 4 * width, 1.f / std::sqrt(4.f * width), 11);
    base = random_floats(outputs, 0.5f, 12);
    scale = random_floats(outputs == 24 ? 3 : 1, 0.3f, 13);
    for (float& s : scale) s += 1.2f;
    norm = random_floats(width, 0.2f, 14);
    for (float& x : norm) x += 1;
  }
};

struct Coefficients {
  Vector mix, value;  // value: pre, post, comb
};
Coefficients coefficients_of(const Vector& streams, const Weights& w, const Vector& fn, const Vector& base,
                             const Vector& scale) {
  const size_t n = streams.size();
  double square = 0;
  for (double v : streams) square += v * v;
  const double rho = 1 / std::sqrt(square / n + kEps);
  Coefficients c{Vector(w.outputs), Vector(24, 0.0)};
  for (int o = 0; o < w.outputs; ++o) {
    double sum = 0;
    for (size_t i = 0; i < n; ++i) sum += fn[o * n + i] * streams[i];
    c.mix[o] = rho * sum;
  }
  const auto sigmoid = [](double x) { return 1 / (1 + std::exp(-x)); };
  for (int j = 0; j < 4; ++j) c.value[j] = sigmoid(c.mix[j] * scale[0] + base[j]) + kEps;
  if (w.outputs == 4) return c;
  for (int j = 0; j < 4; ++j) c.value[4 + j] = 2 * sigmoid(c.mix[4 + j] * scale[1] + base[4 + j]);
  double m[4][4];
  for (int i = 0; i < 4; ++i) {
    double sum = 0;
    for (int j = 0; j < 4; ++j) sum += m[i][j] = std::exp(c.mix[8 + 4 * i + j] * scale[2] + base[8 + 4 * i + j]);
    for (int j = 0; j < 4; ++j) m[i][j] = m[i][j] / sum + kEps;
  }
  for (int t = 0; t < kIterations; ++t) {
    if (t > 0)
      for (auto& row : m) {
        const double sum = row[0] + row[1] + row[2] + row[3] + kEps;
        for (double& x : row) x /= sum;
      }
    for (int j = 0; j < 4; ++j) {
      const double sum = m[0][j] + m[1][j] + m[2][j] + m[3][j] + kEps;
      for (auto& row : m) row[j] /= sum;
    }
  }
  for (int i = 0; i < 16; ++i) c.value[8 + i] = m[i / 4][i % 4];
  return c;
}
Vector mixed(const Vector& streams, const Vector& out, const Vector& c) {
  const size_t d = out.size();
  Vector next(4 * d);
  for (int k = 0; k < 4; ++k)
    for (size_t i = 0; i < d; ++i) {
      next[k * d + i] = c[4 + k] * out[i];
      for (int j = 0; j < 4; ++j) next[k * d + i] += c[8 + 4 * j + k] * streams[j * d + i];
    }
  return next;
}
Vector contracted(const Vector& streams, const Vector& c) {
  const size_t d = streams.size() / 4;
  Vector y(d, 0.0);
  for (int j = 0; j < 4; ++j)
    for (size_t i = 0; i < d; ++i) y[i] += c[j] * streams[j * d + i];
  return y;
}
Vector normed(const Vector& y, const Vector& weight) {
  double square = 0;
  for (double v : y) square += v * v;
  const double rho = 1 / std::sqrt(square / y.size() + kEps);
  Vector x(y.size());
  for (size_t i = 0; i < y.size(); ++i) x[i] = weight[i] * y[i] * rho;
  return x;
}

template <class T>
Vector row_of(const std::vector<T>& all, int row, size_t size) {
  Vector v(size);
  for (size_t i = 0; i < size; ++i) v[i] = value(all[row * size + i]);
  return v;
}
Vector doubles(const std::vector<float>& v) { return {v.begin(), v.end()}; }

// ---- the kernels ----
struct Boundary {
  int rows, width, outputs;
  bool post;
  Buffer<uint16_t> streams, out, next, y, x;
  Buffer<float> finished, fn, base, scale, norm, coefficients, mix, rho, x_scales;
  Buffer<uint8_t> x_values, workspace;
  HyperBoundary arguments;
  Boundary(const Weights& w, const std::vector<uint16_t>& streams_in, const std::vector<uint16_t>& out_in,
           const std::vector<float>& finished_in, bool post)
      : rows(static_cast<int>(streams_in.size() / (4 * w.width))),
        width(w.width),
        outputs(w.outputs),
        post(post),
        streams(streams_in),
        out(out_in),
        next(streams_in.size()),
        y(out_in.size()),
        x(out_in.size()),
        finished(finished_in),
        fn(w.fn),
        base(w.base),
        scale(w.scale),
        norm(w.norm),
        coefficients(static_cast<size_t>(rows) * 24),
        mix(coefficients.size()),
        rho(rows),
        x_scales(static_cast<size_t>(rows) * ((width / 128 + 3) / 4 * 4)),
        x_values(x.size()),
        workspace(hyper_boundary_workspace(rows, width)) {
    arguments = {streams.get(),
                 post ? out.get() : nullptr,
                 post ? finished.get() : nullptr,
                 post ? next.get() : nullptr,
                 mapping(),
                 coefficients.get(),
                 mix.get(),
                 rho.get(),
                 norm.get(),
                 kEps,
                 y.get(),
                 x.get(),
                 x_values.get(),
                 x_scales.get(),
                 workspace.get(),
                 rows,
                 width};
    run();
  }
  HyperMapping mapping() const { return {fn.get(), base.get(), scale.get(), outputs, kIterations, kEps, kEps}; }
  void run() {
    check(hyper_boundary(arguments, nullptr));
    check(cudaDeviceSynchronize());
  }
  std::vector<uint16_t> mapped() const { return post ? next.host() : streams.host(); }
};

struct Inputs {
  Weights w;
  std::vector<uint16_t> streams, out;
  std::vector<float> finished;
  Inputs(int rows, int width, int outputs) : w(width, outputs) {
    streams = random_bf16(static_cast<size_t>(rows) * 4 * width, 1, 1);
    out = random_bf16(static_cast<size_t>(rows) * width, 1, 2);
    finished = random_floats(static_cast<size_t>(rows) * 24, 0.2f, 3);
    for (float& x : finished) x += 0.4f;
  }
};

// One bf16 rounding of the right value, or of a value that FP32 sums moved over a boundary: two halves of the last
// place.
void expect_rounded(const std::vector<uint16_t>& got, int row, const Vector& want, const char* what) {
  for (size_t i = 0; i < want.size(); ++i) {
    const double error = std::abs(value(got[row * want.size() + i]) - want[i]);
    ASSERT_LE(error, std::abs(want[i]) * 0x1p-8 + 1e-5) << what << " of row " << row << ", channel " << i;
  }
}

void compare_forward(int rows, int width, int outputs, bool post) {
  const Inputs in(rows, width, outputs);
  const Boundary b(in.w, in.streams, in.out, in.finished, post);
  const auto mapped_all = b.mapped(), y = b.y.host(), x = b.x.host();
  const auto mix = b.mix.host(), coefficients = b.coefficients.host();
  for (int r = 0; r < rows; r += std::max(1, rows / 40)) {
    if (post)
      expect_rounded(mapped_all, r,
                     mixed(row_of(in.streams, r, 4 * width), row_of(in.out, r, width), row_of(in.finished, r, 24)),
                     "next");
    const Vector streams = row_of(mapped_all, r, 4 * width);  // what the kernel itself rounded
    const Coefficients c = coefficients_of(streams, in.w, doubles(in.w.fn), doubles(in.w.base), doubles(in.w.scale));
    // FP32 sums of 4 * width exact products; Sinkhorn in FP32.
    for (int o = 0; o < outputs; ++o) ASSERT_NEAR(mix[r * 24 + o], c.mix[o], 3e-6) << "row " << r << " output " << o;
    for (int o = 0; o < (outputs == 4 ? 4 : 24); ++o)
      ASSERT_NEAR(coefficients[r * 24 + o], c.value[o], 1e-5) << "row " << r << " coefficient " << o;
    expect_rounded(y, r, contracted(streams, c.value), "y");
    expect_rounded(x, r, normed(row_of(y, r, width), doubles(in.w.norm)), "x");
  }
  // Codes: nearest e4m3 of x / scale, so within 1/16 of the value or half the smallest step.
  const auto values = b.x_values.host();
  const auto scales = b.x_scales.host();
  const int stride = (width / 128 + 3) / 4 * 4;
  for (size_t i = 0; i < x.size(); ++i) {
    const size_t r = i / width, channel = i % width, k = channel % 128;
    const int place = static_cast<int>(k / 8 % 4 * 32 + k / 4 % 2 * 16 + k / 32 * 4 + k % 4);  // inverse of k_of_place
    __nv_fp8_e4m3 code;
    code.__x = values[r * width + channel / 128 * 128 + place];
    const float scale = scales[r * stride + channel / 128];
    ASSERT_LE(std::abs(static_cast<float>(code) * scale - value(x[i])), std::abs(value(x[i])) / 16 + scale * 0x1p-10)
        << "row " << r << " channel " << channel;
    ASSERT_LE(std::abs(value(x[i])), 448 * scale);
  }
}
TEST(HyperConnections, ForwardSmall) {
  for (const bool post : {true, false}) {
    compare_forward(1, 256, 24, post);
    compare_forward(37, 512, 24, post);
    compare_forward(9, 2304, 4, post);
  }
}
TEST(HyperConnections, Forward) {
  for (const bool post : {true, false}) compare_forward(1000, 4096, 24, post);
  compare_forward(333, 7168, 24, true);
  compare_forward(333, 4096, 4, true);
}

TEST(HyperConnections, ARowsBitsDependOnThatRowAlone) {
  const int rows = 777, width = 4096;
  const Inputs in(rows, width, 24);
  const Boundary all(in.w, in.streams, in.out, in.finished, true);
  const auto next = all.next.host(), x = all.x.host();
  const auto coefficients = all.coefficients.host();
  const auto slice = [](const auto& v, size_t from, size_t count) {
    return std::decay_t<decltype(v)>(v.begin() + from, v.begin() + from + count);
  };
  for (const auto& [first, count] : {std::pair{0, 1}, {776, 1}, {501, 3}, {100, 64}}) {
    const Boundary part(in.w, slice(in.streams, size_t(first) * 4 * width, size_t(count) * 4 * width),
                        slice(in.out, size_t(first) * width, size_t(count) * width),
                        slice(in.finished, size_t(first) * 24, size_t(count) * 24), true);
    EXPECT_TRUE(same_bits(part.next.host(), slice(next, size_t(first) * 4 * width, size_t(count) * 4 * width)));
    EXPECT_TRUE(same_bits(part.x.host(), slice(x, size_t(first) * width, size_t(count) * width)));
    EXPECT_TRUE(same_bits(part.coefficients.host(), slice(coefficients, size_t(first) * 24, size_t(count) * 24)));
  }
}

// ---- backward ----
struct Gradients {
  Buffer<uint16_t> d_next, d_x, d_out, d_streams;
  Buffer<float> d_coefficients, d_fn, d_base, d_scale;
  Buffer<uint8_t> workspace;
  HyperPostBackward post;
  HyperPreBackward pre;
  // Of a sublayer whose streams, mapping and coefficients are those of `b`, and whose output was b.out.
  Gradients(const Boundary& b, const std::vector<uint16_t>& d_next_in, const std::vector<uint16_t>& d_x_in)
      : d_next(d_next_in),
        d_x(d_x_in),
        d_out(d_x_in.size()),
        d_streams(d_next_in.size()),
        d_coefficients(b.coefficients.size()),
        d_fn(std::vector<float>(b.fn.size())),
        d_base(std::vector<float>(b.base.size())),
        d_scale(std::vector<float>(b.scale.size())),
        workspace(hyper_pre_backward_workspace(b.rows, b.width, true)) {
    const bool head = b.outputs == 4;
    const uint16_t* streams = b.post ? b.next.get() : b.streams.get();
    post = {d_next.get(),         streams, b.out.get(), b.coefficients.get(), d_out.get(),
            d_coefficients.get(), b.rows,  b.width};
    pre = {head ? nullptr : d_next.get(),
           streams,
           d_x.get(),
           b.coefficients.get(),
           b.mix.get(),
           b.rho.get(),
           b.mapping(),
           b.norm.get(),
           kEps,
           d_coefficients.get(),
           d_streams.get(),
           d_fn.get(),
           d_base.get(),
           d_scale.get(),
           workspace.get(),
           b.rows,
           b.width};
    if (!head) check(hyper_post_backward(post, nullptr));
    check(hyper_pre_backward(pre, nullptr));
    check(cudaDeviceSynchronize());
  }
};

// sum d_x x + sum d_next next of one token, as a function of everything that has a gradient.
double loss_of(const Weights& w, const Vector& streams, const Vector& out, const Vector& fn, const Vector& base,
               const Vector& scale, const Vector& d_x, const Vector& d_next) {
  const Coefficients c = coefficients_of(streams, w, fn, base, scale);
  const Vector x = normed(contracted(streams, c.value), doubles(w.norm));
  double loss = 0;
  for (size_t i = 0; i < x.size(); ++i) loss += d_x[i] * x[i];
  if (w.outputs == 4) return loss;
  const Vector next = mixed(streams, out, c.value);
  for (size_t i = 0; i < next.size(); ++i) loss += d_next[i] * next[i];
  return loss;
}

double dot(const Vector& a, const Vector& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}
double size_of(const Vector& a) { return std::sqrt(dot(a, a)); }

// The gradient along random +-1 directions against central differences. An error vector e of relative size t shows as
// |e . v| of about t |gradient|; four times that is allowed.
void expect_gradient(const Vector& gradient, const std::function<double(const Vector& step)>& loss, double tolerance,
                     const char* what, int seed, int directions = 4) {
  std::mt19937 random(seed);
  for (int n = 0; n < directions; ++n) {
    Vector v(gradient.size()), minus;
    for (double& x : v) x = random() % 2 ? 1e-5 : -1e-5;
    minus = v;
    for (double& x : minus) x = -x;
    const double slope = (loss(v) - loss(minus)) / 2e-5;
    ASSERT_NEAR(dot(gradient, v) * 1e5, slope, 4 * tolerance * size_of(gradient)) << what << ", direction " << n;
  }
}
Vector moved(Vector a, const Vector& step) {
  for (size_t i = 0; i < a.size(); ++i) a[i] += step[i];
  return a;
}

// Tolerance: d_streams and d_out are rounded to bf16 (2^-9 at most, 2^-10 on average), y too inside the forward pass.
void compare_backward(int rows, int width, int outputs) {
  const Inputs in(rows, width, outputs);
  const Boundary b(in.w, in.streams, in.out, in.finished, false);
  const auto d_next = random_bf16(static_cast<size_t>(rows) * 4 * width, 1, 5),
             d_x = random_bf16(static_cast<size_t>(rows) * width, 1, 6);
  const Gradients g(b, d_next, d_x);
  const auto d_streams = g.d_streams.host(), d_out = g.d_out.host();
  const Vector fn = doubles(in.w.fn), base = doubles(in.w.base), scale = doubles(in.w.scale);
  for (int r = 0; r < rows; r += std::max(1, rows / 6)) {
    const Vector streams = row_of(in.streams, r, 4 * width), out = row_of(in.out, r, width), dx = row_of(d_x, r, width),
                 dn = row_of(d_next, r, 4 * width);
    expect_gradient(
        row_of(d_streams, r, 4 * width),
        [&](const Vector& v) { return loss_of(in.w, moved(streams, v), out, fn, base, scale, dx, dn); }, 0x1p-9,
        "d_streams", r);
    if (outputs == 24)
      expect_gradient(
          row_of(d_out, r, width),
          [&](const Vector& v) { return loss_of(in.w, streams, moved(out, v), fn, base, scale, dx, dn); }, 0x1p-9,
          "d_out", r);
  }
  if (static_cast<long>(rows) * width > 40000) return;  // the sums below run over all rows
  const auto total = [&](const Vector& f, const Vector& b0, const Vector& s) {
    double loss = 0;
    for (int r = 0; r < rows; ++r)
      loss += loss_of(in.w, row_of(in.streams, r, 4 * width), row_of(in.out, r, width), f, b0, s, row_of(d_x, r, width),
                      row_of(d_next, r, 4 * width));
    return loss;
  };
  // FP32 gradients; what remains is the rounding of y.
  expect_gradient(
      doubles(g.d_fn.host()), [&](const Vector& v) { return total(moved(fn, v), base, scale); }, 0x1p-9, "d_fn", 1);
  expect_gradient(
      doubles(g.d_base.host()), [&](const Vector& v) { return total(fn, moved(base, v), scale); }, 0x1p-9, "d_base", 2);
  expect_gradient(
      doubles(g.d_scale.host()), [&](const Vector& v) { return total(fn, base, moved(scale, v)); }, 0x1p-8, "d_scale",
      3);
}
TEST(HyperConnections, BackwardSmall) {
  for (const int outputs : {24, 4}) {
    compare_backward(1, 256, outputs);
    compare_backward(70, 256, outputs);
    compare_backward(35, 512, outputs);
  }
}
TEST(HyperConnections, Backward) {
  compare_backward(600, 4096, 24);
  compare_backward(100, 7168, 24);
  compare_backward(100, 4096, 4);
}

// d_fn of many tokens against FP64 sums of the same records' products is what compare_backward cannot afford; here the
// gradient of a run of tokens must be the sum of the gradients of its parts (FP32 sums in another order).
TEST(HyperConnections, WeightGradientsAddUp) {
  const int rows = 1000, width = 1024;
  const Inputs in(rows, width, 24);
  const auto d_next = random_bf16(static_cast<size_t>(rows) * 4 * width, 1, 5),
             d_x = random_bf16(static_cast<size_t>(rows) * width, 1, 6);
  const auto gradient = [&](int first, int count) {
    const auto slice = [&](const auto& v, size_t row_size) {
      return std::decay_t<decltype(v)>(v.begin() + first * row_size, v.begin() + (first + count) * row_size);
    };
    const Boundary b(in.w, slice(in.streams, 4 * width), slice(in.out, width), slice(in.finished, 24), false);
    return Gradients(b, slice(d_next, 4 * width), slice(d_x, width)).d_fn.host();
  };
  Vector sum(static_cast<size_t>(24) * 4 * width, 0.0);
  for (int first = 0; first < rows; first += 100) {
    const auto part = gradient(first, 100);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
  }
  EXPECT_LT(relative_error(gradient(0, rows), sum), 2e-6);
}

TEST(HyperConnections, RepeatsBitwiseBesideOtherWork) {
  const int rows = 1500, width = 4096;
  const Inputs in(rows, width, 24);
  Boundary b(in.w, in.streams, in.out, in.finished, true);
  const auto d_next = random_bf16(in.streams.size(), 1, 5), d_x = random_bf16(in.out.size(), 1, 6);
  Gradients g(b, d_next, d_x);
  const auto next = b.next.host(), x = b.x.host(), d_streams = g.d_streams.host(), d_out = g.d_out.host();
  const auto coefficients = b.coefficients.host(), d_fn = g.d_fn.host(), d_base = g.d_base.host();
  OtherWork work;
  for (int i = 0; i < 100; ++i) {
    work.start(i);
    b.next.poison(), b.x.poison(), b.coefficients.poison(), g.d_streams.poison(), g.d_out.poison();
    g.d_fn.fill(0), g.d_base.fill(0);
    check(hyper_boundary(b.arguments, nullptr));
    check(hyper_post_backward(g.post, nullptr));
    check(hyper_pre_backward(g.pre, nullptr));
    check(cudaStreamSynchronize(nullptr));
    ASSERT_TRUE(same_bits(b.next.host(), next) && same_bits(b.x.host(), x)) << i;
    ASSERT_TRUE(same_bits(b.coefficients.host(), coefficients)) << i;
    ASSERT_TRUE(same_bits(g.d_streams.host(), d_streams) && same_bits(g.d_out.host(), d_out)) << i;
    ASSERT_TRUE(same_bits(g.d_fn.host(), d_fn) && same_bits(g.d_base.host(), d_base)) << i;
  }
}

}  // namespace
}  // namespace plumb::kernels
