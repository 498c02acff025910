// Norms, rotation and storage forms against FP64 code on the CPU; their backward passes against finite differences.
#include "kernels/norm/norm.h"

#include <cuda_fp8.h>

#include <functional>

#include "device_data.cuh"
#include "index_records.h"
#include "kernels/hopper/vectors.cuh"
#include "kernels/rotary/rotary.h"

namespace plumb::kernels {
namespace {

using Vector = std::vector<double>;
constexpr double kEps = 1e-6;

Vector normed(const Vector& x, const Vector& weight) {
  double square = 0;
  for (double v : x) square += v * v;
  const double rho = 1 / std::sqrt(square / x.size() + kEps);
  Vector y(x.size());
  for (size_t i = 0; i < x.size(); ++i) y[i] = x[i] * rho * (weight.empty() ? 1 : weight[i]);
  return y;
}
template <class T>
Vector row_of(const std::vector<T>& all, size_t row, size_t size) {
  Vector v(size);
  for (size_t i = 0; i < size; ++i) v[i] = value(all[row * size + i]);
  return v;
}
std::vector<float> weights(int width) {
  std::vector<float> w = random_floats(width, 0.3f, 4);
  for (float& x : w) x += 1;
  return w;
}
Vector doubles(const std::vector<float>& v) { return {v.begin(), v.end()}; }
double dot(const Vector& a, const Vector& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}
// Along random +-1 directions, as in hyper_connections_test.cu.
void expect_gradient(const Vector& gradient, const std::function<double(const Vector&)>& loss, double tolerance) {
  std::mt19937 random(7);
  for (int n = 0; n < 4; ++n) {
    Vector v(gradient.size()), minus;
    for (double& x : v) x = random() % 2 ? 1e-5 : -1e-5;
    minus = v;
    for (double& x : minus) x = -x;
    ASSERT_NEAR(dot(gradient, v) * 1e5, (loss(v) - loss(minus)) / 2e-5,
                4 * tolerance * std::sqrt(dot(gradient, gradient)));
  }
}
Vector moved(Vector a, const Vector& step) {
  for (size_t i = 0; i < a.size(); ++i) a[i] += step[i];
  return a;
}

// ---- the root ----
// Counts the bit patterns [first, first + 2^24) whose root differs from that of FP64's operations.
__global__ void __launch_bounds__(256) compare_roots(uint32_t first, int* different) {
  const float x = __uint_as_float(first + blockIdx.x * 256 + threadIdx.x);
  const float got = inverse_root(x), want = static_cast<float>(1.0 / sqrt(static_cast<double>(x)));
  if (__float_as_uint(got) != __float_as_uint(want) && !(got != got && want != want)) atomicAdd(different, 1);
}
TEST(Norm, RootsOfAllNumbersAreThoseOfFp64) {
  Buffer<int> different(std::vector<int>{0});
  for (uint64_t first = 0; first < uint64_t{1} << 32; first += 1 << 24)
    compare_roots<<<(1 << 24) / 256, 256>>>(static_cast<uint32_t>(first), different.get());
  EXPECT_EQ(different.host()[0], 0);
}

// ---- rows ----
void compare_norm(int rows, int width) {
  const auto x = random_bf16(static_cast<size_t>(rows) * width, 3, 1);
  const auto w = weights(width);
  const int stride = (width / 128 + 3) / 4 * 4;
  Buffer<uint16_t> xs(x), y(x.size()), plain(x.size());
  Buffer<float> weight(w), scales(static_cast<size_t>(rows) * stride);
  Buffer<uint8_t> values(x.size());
  check(rms_norm({xs.get(), weight.get(), y.get(), values.get(), scales.get(), rows, width, kEps}, nullptr));
  check(rms_norm({xs.get(), weight.get(), plain.get(), nullptr, nullptr, rows, width, kEps}, nullptr));
  const auto got = y.host();
  EXPECT_TRUE(same_bits(got, plain.host()));
  const auto codes = values.host();
  const auto scale = scales.host();
  for (int r = 0; r < rows; ++r) {
    const Vector want = normed(row_of(x, r, width), doubles(w));
    for (int i = 0; i < width; ++i) {
      const double v = value(got[static_cast<size_t>(r) * width + i]);
      ASSERT_LE(std::abs(v - want[i]), std::abs(want[i]) * 0x1.01p-8 + 1e-6);  // one rounding, or a tie moved by FP32
      const int k = i % 128, place = k / 8 % 4 * 32 + k / 4 % 2 * 16 + k / 32 * 4 + k % 4;
      __nv_fp8_e4m3 code;
      code.__x = codes[static_cast<size_t>(r) * width + i / 128 * 128 + place];
      const double s = scale[r * stride + i / 128];
      ASSERT_LE(std::abs(static_cast<double>(float(code)) * s - v), std::abs(v) / 16 + s * 0x1p-10);
    }
  }
}
TEST(Norm, ForwardSmall) {
  compare_norm(1, 256);
  compare_norm(7, 1024);
}
TEST(Norm, Forward) {
  compare_norm(300, 1024);
  compare_norm(100, 4096);
  compare_norm(50, 7168);
}
TEST(Norm, BackwardSmall) {
  for (const auto& [rows, width] : {std::pair{1, 256}, {70, 1024}, {40, 4096}, {33, 7168}}) {
    const auto x = random_bf16(static_cast<size_t>(rows) * width, 1, 1), d = random_bf16(x.size(), 1, 2);
    const auto w = weights(width);
    Buffer<uint16_t> xs(x), ds(d), dx(x.size()), frozen(x.size());
    Buffer<float> weight(w), dw(std::vector<float>(width, 0.5f));
    Buffer<uint8_t> workspace(rms_norm_backward_workspace(rows, width));
    check(rms_norm_backward({xs.get(), ds.get(), weight.get(), dx.get(), dw.get(), workspace.get(), rows, width, kEps},
                            nullptr));
    check(rms_norm_backward({xs.get(), ds.get(), weight.get(), frozen.get(), nullptr, nullptr, rows, width, kEps},
                            nullptr));
    const auto got = dx.host();
    EXPECT_TRUE(same_bits(got, frozen.host()));
    for (int r = 0; r < rows; r += 11)
      expect_gradient(
          row_of(got, r, width),
          [&](const Vector& v) { return dot(normed(moved(row_of(x, r, width), v), doubles(w)), row_of(d, r, width)); },
          0x1p-9);
    Vector gradient = doubles(dw.host());
    for (double& g : gradient) g -= 0.5;  // what was there before
    expect_gradient(
        gradient,
        [&](const Vector& v) {
          double loss = 0;
          for (int r = 0; r < rows; ++r)
            loss += dot(normed(row_of(x, r, width), moved(doubles(w), v)), row_of(d, r, width));
          return loss;
        },
        1e-6);
  }
}

// ---- vectors ----
const std::vector<float>& frequencies() {
  static const std::vector<float> f = [] {
    std::vector<float> v(32);
    for (int j = 0; j < 32; ++j) v[j] = static_cast<float>(std::pow(10000.0, -j / 32.0));
    return v;
  }();
  return f;
}
void rotate(Vector& v, int position, int direction) {
  for (int j = 0; j < 32; ++j) {
    const double angle = static_cast<float>(position) * frequencies()[j], c = std::cos(angle),
                 s = direction * std::sin(angle);
    double &even = v[v.size() - 64 + 2 * j], &odd = v[v.size() - 63 + 2 * j];
    const double e = even * c - odd * s, o = even * s + odd * c;
    even = e, odd = o;
  }
}
void hadamard(Vector& v) {
  Vector out(v.size(), 0.0);
  for (size_t i = 0; i < v.size(); ++i)
    for (size_t k = 0; k < v.size(); ++k) out[i] += (__builtin_popcountll(i & k) % 2 ? -1 : 1) * v[k];
  for (size_t i = 0; i < v.size(); ++i) v[i] = out[i] / std::sqrt(static_cast<double>(v.size()));
}
// Nearest value with `bits` bits behind the leading one, smallest binade 2^lowest, times a power-of-two scale.
void quantise(Vector& v, size_t first, size_t count, double floor, double limit, int bits, int lowest) {
  double top = floor;
  for (size_t i = first; i < first + count; ++i) top = std::max(top, std::abs(v[i]));
  const double scale = std::exp2(std::ceil(std::log2(static_cast<float>(top) * (1.0f / static_cast<float>(limit)))));
  for (size_t i = first; i < first + count; ++i) {
    const double x = v[i] / scale, size = std::max(std::abs(x), std::exp2(lowest));
    const double step = std::exp2(std::floor(std::log2(size)) - bits);
    v[i] = std::clamp(std::nearbyint(x / step) * step, -limit, limit) * scale;
  }
}

struct Kind {
  int width;
  VectorNorm norm;
  VectorStorage storage;
};
const Kind kKinds[] = {
    {512, VectorNorm::plain, VectorStorage::plain},        {512, VectorNorm::weighted, VectorStorage::plain},
    {512, VectorNorm::weighted, VectorStorage::fp8},       {128, VectorNorm::none, VectorStorage::plain},
    {128, VectorNorm::weighted, VectorStorage::plain},     {128, VectorNorm::none, VectorStorage::fp4_record},
    {128, VectorNorm::weighted, VectorStorage::fp4_record}};
bool is_fp4(const Kind& kind) { return kind.storage == VectorStorage::fp4_record; }

void round_all(Vector& v) {
  for (double& x : v) x = plumb::round_bf16(static_cast<float>(x));
}
// The forward pass; exact = false leaves the roundings out.
Vector finished(Vector v, const Kind& kind, const Vector& weight, int position, bool exact) {
  if (kind.norm != VectorNorm::none) {
    v = normed(v, kind.norm == VectorNorm::weighted ? weight : Vector{});
    if (exact) round_all(v);
  }
  rotate(v, position, 1);
  if (exact) round_all(v);
  if (is_fp4(kind)) {
    hadamard(v);
    if (exact) round_all(v);
    for (size_t i = 0; exact && i < v.size(); i += 32) quantise(v, i, 32, 6 * 0x1p-126, 6, 1, 0);
  }
  if (kind.storage == VectorStorage::fp8)
    for (size_t i = 0; exact && i + 64 < v.size(); i += 64) quantise(v, i, 64, 1e-4, 448, 3, -6);
  return v;
}

struct Finish {
  Buffer<uint16_t> x, y;
  Buffer<int> position;
  Buffer<float> frequency, weight;
  Buffer<float2> table;
  FinishVectors arguments;
  Finish(const std::vector<uint16_t>& values, const std::vector<int>& positions, int vectors, const Kind& kind)
      : x(values),
        y(kind.storage == VectorStorage::fp4_record ? values.size() / kIndexDim * kIndexRecordBytes / 2
                                                    : values.size()),
        position(positions),
        frequency(frequencies()),
        weight(weights(kind.width)),
        table(positions.size() * 32) {
    const int rows = static_cast<int>(positions.size());
    check(rotary_table(position.get(), frequency.get(), rows, table.get(), nullptr));
    arguments = {x.get(),     kind.norm == VectorNorm::weighted ? weight.get() : nullptr,
                 table.get(), nullptr,
                 y.get(),     rows,
                 vectors,     kind.width,
                 kind.norm,   kind.storage,
                 kEps};
    check(finish_vectors(arguments, nullptr));
  }
  // What the results mean.
  std::vector<uint16_t> values() const {
    const auto written = y.host();
    if (arguments.storage != VectorStorage::fp4_record) return {written.begin(), written.begin() + x.size()};
    return values_of_records(reinterpret_cast<const uint8_t*>(written.data()), x.size() / kIndexDim);
  }
};
std::vector<int> some_positions(int rows) {
  std::vector<int> p(rows);
  for (int r = 0; r < rows; ++r) p[r] = r % 5 == 4 ? 1000000 + 7 * r : 37 * r;
  return p;
}

// Values that lie on a rounding boundary may go either way when FP32 moves them by its last bits; after FP4 or FP8 that
// is a whole step of the format. So: the errors' size, and how many are larger than a bf16 rounding.
void compare_finish(int rows, int vectors, const Kind& kind) {
  const auto x = random_bf16(static_cast<size_t>(rows) * vectors * kind.width, 2, 1);
  const auto position = some_positions(rows);
  const Finish f(x, position, vectors, kind);
  const auto y = f.values();
  std::vector<double> want;
  size_t moved_far = 0;
  for (int v = 0; v < rows * vectors; ++v) {
    const Vector one =
        finished(row_of(x, v, kind.width), kind, doubles(weights(kind.width)), position[v / vectors], true);
    for (int i = 0; i < kind.width; ++i)
      moved_far +=
          !(std::abs(value(y[static_cast<size_t>(v) * kind.width + i]) - one[i]) <= std::abs(one[i]) * 0x1p-7 + 1e-6);
    want.insert(want.end(), one.begin(), one.end());
  }
  EXPECT_LT(relative_error(y, want), is_fp4(kind) ? 2e-2 : 3e-3);
  EXPECT_LT(moved_far, 4 + y.size() / 400);
}
TEST(Vectors, ForwardSmall) {
  for (const Kind& kind : kKinds) {
    compare_finish(1, 1, kind);
    compare_finish(37, 3, kind);
  }
}
TEST(Vectors, Forward) {
  for (const Kind& kind : kKinds) compare_finish(100, 16, kind);
}
// Index vectors: what a record's tail says of its codes, and the device's own reading of it.
TEST(Vectors, RecordsSmall) {
  const int rows = 60;
  auto x = random_bf16(rows * 128, 2, 5);
  for (int r = 0; r < rows; ++r)  // what the transform leaves in some blocks only, nothing, NaN
    for (int i = 0; i < 128; ++i) {
      uint16_t& to = x[r * 128 + i];
      if (r % 6 == 1) to = float_to_bf16(1.5f + (i == 3) * 1e-6f);
      if (r % 6 == 2) to = float_to_bf16(i % 32 == 0 ? 2.0f : i == 1 ? std::ldexp(1.0f, -r / 4) : 0);
      if (r % 6 == 3) to = 0;
      if (r == 4 && i == 77) to = float_to_bf16(INFINITY);
    }
  const Kind kind{128, VectorNorm::none, VectorStorage::fp4_record};
  const Finish f(x, std::vector<int>(rows, 0), 1, kind);
  const auto written = f.y.host();
  const auto* records = reinterpret_cast<const uint8_t*>(written.data());
  const auto values = f.values();
  Buffer<uint16_t> read(values.size());
  check(index_values(f.y.get(), rows, read.get(), nullptr));
  const auto device_values = read.host();
  int folded = 0, spread = 0;
  for (int r = 0; r < rows; ++r) {
    const IndexTail tail = tail_of(records + r * kIndexRecordBytes);
    int high = 0, low = 255;
    for (int b = 0; b < 4; ++b) {
      const int exponent = tail.exponents >> 8 * b & 255;
      high = std::max(high, exponent), low = std::min(low, exponent);
    }
    ASSERT_EQ(tail.power, std::ldexp(1.0f, high - 127));
    ASSERT_EQ(tail.zero, 0u);
    double square = 0;
    for (int i = 0; i < 128; ++i) {
      const float v = bf16_to_float(values[r * 128 + i]);
      if (r == 4)
        ASSERT_TRUE(std::isnan(v) && std::isnan(bf16_to_float(device_values[r * 128 + i])));
      else
        ASSERT_EQ(v, bf16_to_float(device_values[r * 128 + i]));
      square += double{v} * v;
    }
    if (r == 4) {
      EXPECT_FALSE(tail.length < INFINITY);
      continue;
    }
    if (square == 0) {
      EXPECT_EQ(tail.length, 0);
      continue;
    }
    if (high != low) {  // not folded
      EXPECT_GT(high - low, kFoldedSpan);
      EXPECT_EQ(tail.length, INFINITY);
      ++spread;
      continue;
    }
    ++folded;
    // The step: a power of two of which all channels are multiples.
    const double step = std::sqrt(square / tail.length);
    EXPECT_NEAR(std::log2(step), std::round(std::log2(step)), 1e-6) << r;
    const double exact = std::exp2(std::round(std::log2(step)));
    for (int i = 0; i < 128; ++i) {
      const double steps = bf16_to_float(values[r * 128 + i]) / exact;
      ASSERT_EQ(steps, std::round(steps)) << r;
    }
  }
  EXPECT_GT(folded, 20);
  EXPECT_GT(spread, 3);
}
TEST(Vectors, SlotsAndBits) {
  for (const Kind& kind : kKinds) {
    const int rows = 77;
    const auto x = random_bf16(static_cast<size_t>(rows) * kind.width, 2, 1);
    const auto position = some_positions(rows);
    const Finish all(x, position, 1, kind);
    const auto y = all.y.host();
    std::vector<int> slot(rows);
    for (int r = 0; r < rows; ++r) slot[r] = (r * 30 + 5) % 77;
    Buffer<int> slots(slot);
    Buffer<uint16_t> placed(y.size());
    FinishVectors a = all.arguments;
    a.slot = slots.get(), a.y = placed.get();
    check(finish_vectors(a, nullptr));
    const auto moved_rows = placed.host();
    const size_t width = y.size() / rows;
    for (int r = 0; r < rows; ++r) ASSERT_EQ(0, std::memcmp(&y[r * width], &moved_rows[slot[r] * width], width * 2));
    const Finish one({x.begin() + 50 * kind.width, x.begin() + 51 * kind.width}, {position[50]}, 1, kind);
    ASSERT_EQ(0, std::memcmp(&y[50 * width], one.y.host().data(), width * 2));
  }
}
TEST(Vectors, BackwardSmall) {
  for (const Kind& kind : kKinds)
    for (const int rows : {1, 90}) {
      const int vectors = 3;
      const auto x = random_bf16(static_cast<size_t>(rows) * vectors * kind.width, 1, 1),
                 d = random_bf16(x.size(), 1, 2);
      const auto position = some_positions(rows);
      const auto w = weights(kind.width);
      const Finish f(x, position, vectors, kind);
      Buffer<uint16_t> ds(d), dx(x.size());
      const bool weighted = kind.norm == VectorNorm::weighted;
      Buffer<float> dw(std::vector<float>(kind.width, 0.f));
      Buffer<uint8_t> workspace(finish_vectors_backward_workspace(rows, vectors, kind.width));
      check(finish_vectors_backward(
          {f.x.get(), ds.get(), f.arguments.weight, f.table.get(), dx.get(), weighted ? dw.get() : nullptr,
           workspace.get(), rows, vectors, kind.width, kind.norm, kind.storage, kEps},
          nullptr));
      const auto got = dx.host();
      const auto loss = [&](int v, const Vector& step, const Vector& weight_step) {
        return dot(finished(moved(row_of(x, v, kind.width), step), kind, moved(doubles(w), weight_step),
                            position[v / vectors], false),
                   row_of(d, v, kind.width));
      };
      const Vector none(kind.width, 0.0);
      for (int v = 0; v < rows * vectors; v += 29)
        expect_gradient(
            row_of(got, v, kind.width), [&](const Vector& s) { return loss(v, s, none); }, 0x1p-9);
      if (weighted)
        expect_gradient(
            doubles(dw.host()),
            [&](const Vector& s) {
              double sum = 0;
              for (int v = 0; v < rows * vectors; ++v) sum += loss(v, none, s);
              return sum;
            },
            1e-6);
    }
}
TEST(Vectors, TailsTurnBackSmall) {
  const int rows = 40, vectors = 5;
  const auto x = random_bf16(static_cast<size_t>(rows) * vectors * 512, 1, 1);
  const Finish f(x, some_positions(rows), vectors, kKinds[0]);
  Buffer<uint16_t> turned(x);
  check(rotate_tails(turned.get(), f.table.get(), rows, vectors, 512, true, nullptr));
  const auto y = turned.host();
  for (int v = 0; v < rows * vectors; ++v) {
    Vector want = row_of(x, v, 512);
    rotate(want, some_positions(rows)[v / vectors], -1);
    for (int i = 0; i < 512; ++i)
      ASSERT_LE(std::abs(value(y[static_cast<size_t>(v) * 512 + i]) - want[i]), std::abs(want[i]) * 0x1.01p-8 + 1e-6);
  }
}
TEST(Vectors, RepeatsBitwiseBesideOtherWork) {
  const int rows = 500;
  const auto x = random_bf16(static_cast<size_t>(rows) * 512, 1, 1), d = random_bf16(x.size(), 1, 2);
  const Finish f(x, some_positions(rows), 1, kKinds[2]);
  Buffer<uint16_t> ds(d), dx(x.size()), y(x.size());
  Buffer<float> dw(512);
  Buffer<uint8_t> workspace(finish_vectors_backward_workspace(rows, 1, 512));
  OtherWork work;
  std::vector<uint16_t> first_y, first_dx;
  std::vector<float> first_dw;
  for (int i = 0; i < 100; ++i) {
    work.start(i);
    dw.fill(0);
    FinishVectors a = f.arguments;
    a.y = y.get();
    check(finish_vectors(a, nullptr));
    check(finish_vectors_backward({f.x.get(), ds.get(), f.arguments.weight, f.table.get(), dx.get(), dw.get(),
                                   workspace.get(), rows, 1, 512, VectorNorm::weighted, VectorStorage::fp8, kEps},
                                  nullptr));
    if (i == 0) first_y = y.host(), first_dx = dx.host(), first_dw = dw.host();
    ASSERT_TRUE(same_bits(y.host(), first_y) && same_bits(dx.host(), first_dx) && same_bits(dw.host(), first_dw)) << i;
  }
}

}  // namespace
}  // namespace plumb::kernels
