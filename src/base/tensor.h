// Tensor: a shape, an element type and shared memory, the host's or a device's. Always contiguous and row-major: no
// strides, no graph, no dispatch. Ops are free functions over tensors (src/ops); whoever needs another layout copies.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace plumb {

// i8 also holds packed FP4 (two e2m1 codes a byte, low nibble = even element), as in safetensors files.
enum class DType : uint8_t { f32, f64, bf16, f16, f8_e4m3, f8_e8m0, u8, i8, i32, i64 };
size_t dtype_size(DType t);
const char* dtype_name(DType t);  // "f32", "bf16", "f8_e4m3", ...

template <class T>
struct dtype_of;
template <>
struct dtype_of<float> {
  static constexpr DType value = DType::f32;
};
template <>
struct dtype_of<double> {
  static constexpr DType value = DType::f64;
};
template <>
struct dtype_of<uint16_t> {
  static constexpr DType value = DType::bf16;
};
template <>
struct dtype_of<uint8_t> {
  static constexpr DType value = DType::u8;
};
template <>
struct dtype_of<int8_t> {
  static constexpr DType value = DType::i8;
};
template <>
struct dtype_of<int32_t> {
  static constexpr DType value = DType::i32;
};
template <>
struct dtype_of<int64_t> {
  static constexpr DType value = DType::i64;
};

// Where a tensor's memory is. Results of ops are where their inputs are.
enum class Space : uint8_t { host, device };
const char* space_name(Space s);

// The memory of the device, registered by the room that has one (ops/gpu). Everything happens in order of the calls,
// as the device's own work does; when a copy returns, the host's side of it may be read or changed.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  virtual std::shared_ptr<void> allocate(size_t bytes) = 0;  // aligned to 256; given back when the pointer is gone
  // Host memory that copies take at the link's speed; when the pointer is gone, the next caller gets it.
  virtual std::shared_ptr<void> staging(size_t bytes) = 0;
  virtual void zero(void* to, size_t bytes) = 0;
  virtual void copy(void* to, Space to_space, const void* from, Space from_space, size_t bytes) = 0;
};
void set_device_memory(DeviceMemory* memory);  // must live as long as the program
bool has_device_memory();

using Shape = std::vector<int64_t>;
int64_t numel_of(const Shape& shape);
std::string to_string(const Shape& shape);  // "[32768,1024]"

class Tensor {
 public:
  Tensor() = default;  // undefined: defined() is false
  // Not initialised; aligned to 64 bytes. Error: no memory, or no device.
  static Tensor empty(Shape shape, DType type = DType::f32, Space space = Space::host);
  static Tensor zeros(Shape shape, DType type = DType::f32, Space space = Space::host);
  static Tensor full(Shape shape, float value);                                               // f32
  static Tensor over(std::byte* data, Shape shape, DType type, std::shared_ptr<void> owner,
                     Space space = Space::host);  // no copy
  template <class T>
  static Tensor of(const std::vector<T>& values, Shape shape = {});  // copies; shape {} = [n]

  bool defined() const { return data_ != nullptr || shape_known_; }
  DType dtype() const { return dtype_; }
  Space space() const { return space_; }
  bool on_device() const { return space_ == Space::device; }
  const Shape& shape() const { return shape_; }
  int dim() const { return static_cast<int>(shape_.size()); }
  int64_t size(int i) const { return shape_[i < 0 ? i + shape_.size() : i]; }  // -1 = last
  int64_t numel() const { return numel_; }
  size_t bytes() const { return static_cast<size_t>(numel_) * dtype_size(dtype_); }
  int64_t row_size() const {
    return dim() == 0 || size(0) == 0 ? 0 : numel_ / size(0);
  }  // elements of one index of dim 0

  std::byte* raw() const { return data_; }  // an address in its space
  // Typed access, of host tensors only. f8 and u8 tensors are read as uint8_t, bf16 and f16 as uint16_t; anything else
  // must match exactly.
  template <class T>
  T* ptr() const {
    check_access(dtype_of<T>::value, Space::host);
    return reinterpret_cast<T*>(data_);
  }
  // The same for device tensors: an address that only the device may read.
  template <class T>
  T* device() const {
    check_access(dtype_of<T>::value, Space::device);
    return reinterpret_cast<T*>(data_);
  }
  float* f32() const { return ptr<float>(); }

  Tensor view(Shape shape) const;                 // same elements, other shape
  Tensor view(Shape shape, DType type) const;     // same bytes, as elements of another type
  Tensor rows(int64_t begin, int64_t end) const;  // slice of dimension 0, shares memory
  Tensor clone() const;
  void fill(float value);  // f32 on the host
  void zero();

 private:
  void check_access(DType wanted, Space from) const;
  std::shared_ptr<void> owner_;
  std::byte* data_ = nullptr;
  Shape shape_;
  int64_t numel_ = 0;
  DType dtype_ = DType::f32;
  Space space_ = Space::host;
  bool shape_known_ = false;  // tensors with zero elements are defined too
};

// A tensor of x's type where x is, with x's shape or another one.
Tensor empty_like(const Tensor& x, Shape shape);
Tensor zeros_like(const Tensor& x);
// A copy in the host's memory; bf16 of a device becomes f32, which is what ops on the host read.
Tensor to_host(const Tensor& x);
// A copy on the device, of the same type.
Tensor to_device(const Tensor& x);
// The bytes of `from` into `to`, which may be elsewhere. Both have the same number of bytes.
void copy_bytes(const Tensor& to, const Tensor& from);
// Host memory for what goes to the device or comes from it in large pieces (DeviceMemory::staging); not initialised.
Tensor staging(Shape shape, DType type = DType::f32);

template <class T>
Tensor Tensor::of(const std::vector<T>& values, Shape shape) {
  if (shape.empty()) shape = {static_cast<int64_t>(values.size())};
  Tensor t = empty(std::move(shape), dtype_of<T>::value);
  if (static_cast<size_t>(t.numel_) != values.size()) t.view({static_cast<int64_t>(values.size())});  // throws
  std::copy(values.begin(), values.end(), t.ptr<T>());
  return t;
}

}  // namespace plumb
