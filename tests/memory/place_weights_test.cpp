// What a run computes with, on a machine that may or may not have a GPU.
#include <gtest/gtest.h>

#include "base/error.h"
#include "memory/device_weights.h"
#include "ops/device.h"
#include "support/tiny_model.h"

namespace plumb {
namespace {

std::string error_of(const std::shared_ptr<ResidentWeights>& weights, const char* kernels, Numerics n) {
  try {
    place_weights(weights, kernels, n);
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

TEST(PlaceWeights, ReferenceIsTheHost) {
  const auto weights = testing::random_model(testing::tiny_config(), 1);
  const PlacedWeights placed = place_weights(weights, "reference", Numerics::released);
  EXPECT_EQ(placed.store, weights);
  EXPECT_EQ(placed.store->space(), Space::host);
  EXPECT_EQ(placed.warning, "");
}

// The tiny model's heads are not those of the kernels, so `auto` stays on the CPU wherever it runs.
TEST(PlaceWeights, AutoTakesTheHostWhereTheKernelsDoNotFit) {
  const auto weights = testing::random_model(testing::tiny_config(), 1);
  for (Numerics n : {Numerics::fp32, Numerics::bf16, Numerics::released})
    EXPECT_EQ(place_weights(weights, "auto", n).store->space(), Space::host);
}

TEST(PlaceWeights, CudaIsRefusedWithTheReason) {
  const auto weights = testing::random_model(testing::tiny_config(), 1);
  EXPECT_NE(error_of(weights, "cuda", Numerics::bf16).find("numerics = \"bf16\""), std::string::npos);
  const ops::DeviceStatus device = ops::open_device();
  if (device.usable) GTEST_SKIP() << "there is a GPU here";
  EXPECT_NE(error_of(weights, "cuda", Numerics::released).find(device.what), std::string::npos);
}

}  // namespace
}  // namespace plumb
