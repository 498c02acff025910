// What the tests of the model on a GPU share: one small Flash-shaped model on both sides, documents, adapters.
#pragma once
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "base/float_formats.h"
#include "flash_model.h"
#include "memory/device_weights.h"
#include "model/forward.h"

namespace plumb::testing {

// Made once: packing four layers takes seconds.
struct Models {
  std::shared_ptr<ResidentWeights> cpu = flash_model(1);
  std::shared_ptr<DeviceWeights> gpu = std::make_shared<DeviceWeights>(cpu);
};
inline Models& models() {
  static Models& m = *new Models;
  return m;
}

inline std::vector<int> tokens(int n, int seed) {
  std::vector<int> ids(n);
  for (int i = 0; i < n; ++i) ids[i] = (i * 131 + seed * 977 + i * i * 7) % flash_config().vocab_size;
  return ids;
}

// ||gpu - cpu|| / ||cpu||
inline double relative_error(const Tensor& gpu, const Tensor& cpu) {
  const Tensor x = to_host(gpu);
  EXPECT_EQ(x.numel(), cpu.numel());
  double error = 0, size = 0;
  for (int64_t i = 0; i < cpu.numel(); ++i) {
    const double d = double{x.f32()[i]} - cpu.f32()[i];
    error += d * d, size += double{cpu.f32()[i]} * cpu.f32()[i];
  }
  return std::sqrt(error / (size + 1e-300));
}

// As a bf16 tensor of the device holds it.
inline Tensor to_device_bf16(const Tensor& x) {
  const Tensor packed = Tensor::empty(x.shape(), DType::bf16);
  for (int64_t i = 0; i < x.numel(); ++i) packed.ptr<uint16_t>()[i] = float_to_bf16(x.f32()[i]);
  return to_device(packed);
}

inline ForwardOptions options(const AdapterBatch* adapters = nullptr) {
  ForwardOptions o;
  o.adapters = adapters;
  return o;
}

struct Case {
  SequencePlan plan;
  Tensor hidden_of(WeightStore& w, const AdapterBatch* adapters = nullptr) const {
    return forward(w, plan, options(adapters)).hidden;
  }
};
inline Case documents(const std::vector<std::vector<int>>& ids) {
  return {plan_documents(plan_shape(flash_config()), ids)};
}

inline AdapterBatch one_adapter(std::shared_ptr<const Adapter> adapter, AdapterGrads* grads = nullptr) {
  AdapterBatch batch;
  batch.parts.push_back({std::move(adapter), {}, true, grads});
  return batch;
}

}  // namespace plumb::testing
