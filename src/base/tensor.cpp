#include "base/tensor.h"

#include <malloc.h>

#include <cstdlib>
#include <cstring>

#include "base/error.h"
#include "base/float_formats.h"

namespace plumb {
namespace {

// A pass allocates and frees the same activations again and again. By default glibc returns their pages to the system
// each time, and every first touch of a new page costs a fault. One arena: a block is freed by another thread than it
// was allocated by.
[[maybe_unused]] const bool pages_are_kept = [] {
  constexpr int kLargestThreshold = 32 << 20, kNever = 1 << 30;
  return mallopt(M_ARENA_MAX, 1) && mallopt(M_MMAP_THRESHOLD, kLargestThreshold) && mallopt(M_TRIM_THRESHOLD, kNever) &&
         mallopt(M_TOP_PAD, kLargestThreshold);
}();

DeviceMemory* device_memory = nullptr;

DeviceMemory& the_device() {
  if (!device_memory)
    fail("device memory", "this program runs without a GPU", "build it with the CUDA toolkit (PLUMB_CUDA=ON)");
  return *device_memory;
}

}  // namespace

const char* space_name(Space s) { return s == Space::host ? "host" : "device"; }
void set_device_memory(DeviceMemory* memory) { device_memory = memory; }
bool has_device_memory() { return device_memory != nullptr; }

size_t dtype_size(DType t) {
  switch (t) {
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::bf16:
    case DType::f16:
      return 2;
    case DType::f8_e4m3:
    case DType::f8_e8m0:
    case DType::u8:
    case DType::i8:
      return 1;
  }
  return 0;
}

const char* dtype_name(DType t) {
  switch (t) {
    case DType::f32:
      return "f32";
    case DType::f64:
      return "f64";
    case DType::bf16:
      return "bf16";
    case DType::f16:
      return "f16";
    case DType::f8_e4m3:
      return "f8_e4m3";
    case DType::f8_e8m0:
      return "f8_e8m0";
    case DType::u8:
      return "u8";
    case DType::i8:
      return "i8";
    case DType::i32:
      return "i32";
    case DType::i64:
      return "i64";
  }
  return "?";
}

int64_t numel_of(const Shape& shape) {
  int64_t n = 1;
  for (int64_t s : shape) n *= s;
  return n;
}

std::string to_string(const Shape& shape) {
  std::string s = "[";
  for (size_t i = 0; i < shape.size(); ++i) s += (i ? "," : "") + std::to_string(shape[i]);
  return s + "]";
}

Tensor Tensor::empty(Shape shape, DType type, Space space) {
  const size_t bytes = static_cast<size_t>(numel_of(shape)) * dtype_size(type);
  if (space == Space::device) {
    std::shared_ptr<void> memory = the_device().allocate(std::max<size_t>(bytes, 16));
    std::byte* data = static_cast<std::byte*>(memory.get());
    Tensor t = over(data, std::move(shape), type, std::move(memory));
    t.space_ = space;
    return t;
  }
  const size_t padded = std::max<size_t>(64, (bytes + 63) / 64 * 64);
  void* memory = std::aligned_alloc(64, padded);
  if (!memory) fail("memory", "cannot allocate " + std::to_string(padded) + " bytes", "use a smaller model or batch");
  return over(static_cast<std::byte*>(memory), std::move(shape), type, std::shared_ptr<void>(memory, std::free));
}

Tensor Tensor::zeros(Shape shape, DType type, Space space) {
  Tensor t = empty(std::move(shape), type, space);
  t.zero();
  return t;
}

Tensor Tensor::full(Shape shape, float value) {
  Tensor t = empty(std::move(shape));
  t.fill(value);
  return t;
}

Tensor Tensor::over(std::byte* data, Shape shape, DType type, std::shared_ptr<void> owner, Space space) {
  Tensor t;
  t.owner_ = std::move(owner);
  t.data_ = data;
  t.numel_ = numel_of(shape);
  t.shape_ = std::move(shape);
  t.dtype_ = type;
  t.space_ = space;
  t.shape_known_ = true;
  return t;
}

Tensor Tensor::view(Shape shape) const {
  if (numel_of(shape) != numel_)
    fail("tensor", "view of " + to_string(shape_) + " as " + to_string(shape) + " changes the number of elements");
  Tensor t = *this;
  t.shape_ = std::move(shape);
  return t;
}

Tensor Tensor::view(Shape shape, DType type) const {
  Tensor t = *this;
  t.dtype_ = type, t.shape_ = std::move(shape), t.numel_ = numel_of(t.shape_);
  PLUMB_CHECK(t.bytes() == bytes(), to_string(shape_) + " as " + dtype_name(type) + " " + to_string(t.shape_));
  return t;
}

Tensor Tensor::rows(int64_t begin, int64_t end) const {
  PLUMB_CHECK(dim() >= 1 && 0 <= begin && begin <= end && end <= size(0),
              std::to_string(begin) + ".." + std::to_string(end) + " of " + to_string(shape_));
  Tensor t = *this;
  t.shape_[0] = end - begin;
  t.numel_ = numel_of(t.shape_);
  t.data_ = data_ + static_cast<size_t>(begin * row_size()) * dtype_size(dtype_);
  return t;
}

Tensor Tensor::clone() const {
  Tensor t = empty(shape_, dtype_, space_);
  copy_bytes(t, *this);
  return t;
}

void Tensor::fill(float value) { std::fill_n(f32(), numel_, value); }

void Tensor::zero() {
  if (!bytes()) return;
  if (on_device())
    the_device().zero(data_, bytes());
  else
    std::memset(data_, 0, bytes());
}

void Tensor::check_access(DType wanted, Space from) const {
  const bool byte = wanted == DType::u8 && dtype_size(dtype_) == 1;
  const bool half = wanted == DType::bf16 && dtype_size(dtype_) == 2;
  PLUMB_CHECK(dtype_ == wanted || byte || half,
              std::string(dtype_name(wanted)) + " wanted, tensor is " + dtype_name(dtype_));
  PLUMB_CHECK(space_ == from, std::string("read on the ") + space_name(from) + ", tensor " + to_string(shape_) +
                                  " is on the " + space_name(space_));
}

Tensor empty_like(const Tensor& x, Shape shape) { return Tensor::empty(std::move(shape), x.dtype(), x.space()); }
Tensor zeros_like(const Tensor& x) { return Tensor::zeros(x.shape(), x.dtype(), x.space()); }

void copy_bytes(const Tensor& to, const Tensor& from) {
  PLUMB_CHECK(to.bytes() == from.bytes(), to_string(from.shape()) + " to " + to_string(to.shape()));
  if (!from.bytes()) return;
  if (to.on_device() || from.on_device())
    the_device().copy(to.raw(), to.space(), from.raw(), from.space(), from.bytes());
  else
    std::memcpy(to.raw(), from.raw(), from.bytes());
}

Tensor staging(Shape shape, DType type) {
  const size_t bytes = static_cast<size_t>(numel_of(shape)) * dtype_size(type);
  std::shared_ptr<void> memory = the_device().staging(std::max<size_t>(bytes, 16));
  std::byte* data = static_cast<std::byte*>(memory.get());
  return Tensor::over(data, std::move(shape), type, std::move(memory));
}

Tensor to_host(const Tensor& x) {
  Tensor copy = Tensor::empty(x.shape(), x.dtype());
  copy_bytes(copy, x);
  if (!x.on_device() || x.dtype() != DType::bf16) return copy;
  Tensor wide = Tensor::empty(x.shape());
  for (int64_t i = 0; i < x.numel(); ++i) wide.f32()[i] = bf16_to_float(copy.ptr<uint16_t>()[i]);
  return wide;
}

Tensor to_device(const Tensor& x) {
  Tensor copy = Tensor::empty(x.shape(), x.dtype(), Space::device);
  copy_bytes(copy, x);
  return copy;
}

}  // namespace plumb
