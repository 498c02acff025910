// Tensors on a device, whose memory here is a stand-in on the host.
#include <gtest/gtest.h>

#include "base/error.h"
#include "base/float_formats.h"
#include "base/tensor.h"
#include "support/stand_in_device.h"

namespace plumb {
namespace {

struct TensorSpace : ::testing::Test {
  testing::StandInDevice device;
};

TEST_F(TensorSpace, CopiesComeBackUnchanged) {
  const Tensor there = to_device(Tensor::of<float>({1, 2, 3, 4}, {2, 2}));
  EXPECT_TRUE(there.on_device());
  EXPECT_EQ(there.shape(), (Shape{2, 2}));
  const Tensor back = to_host(there.rows(1, 2));
  EXPECT_EQ(back.space(), Space::host);
  EXPECT_EQ(back.f32()[0], 3);
  EXPECT_EQ(back.f32()[1], 4);
}

TEST_F(TensorSpace, Bf16OfTheDeviceIsReadAsFloats) {
  Tensor packed = Tensor::empty({3}, DType::bf16);
  for (int i = 0; i < 3; ++i) packed.ptr<uint16_t>()[i] = float_to_bf16(1.5f * static_cast<float>(i));
  const Tensor back = to_host(to_device(packed));
  EXPECT_EQ(back.dtype(), DType::f32);
  EXPECT_EQ(back.f32()[2], 3);
}

TEST_F(TensorSpace, StagingMemoryIsTheHosts) {
  const Tensor here = staging({2, 3});
  EXPECT_FALSE(here.on_device());
  EXPECT_EQ(here.shape(), (Shape{2, 3}));
  for (int i = 0; i < 6; ++i) here.f32()[i] = static_cast<float>(i);
  EXPECT_EQ(to_host(to_device(here)).f32()[5], 5);
}

TEST_F(TensorSpace, ViewsAndCopiesStayWhereTheyAre) {
  const Tensor there = Tensor::zeros({4, 2}, DType::i32, Space::device);
  EXPECT_TRUE(there.view({8}).on_device() && there.rows(1, 3).on_device() && there.clone().on_device());
  EXPECT_TRUE(zeros_like(there).on_device() && empty_like(there, {5}).on_device());
  EXPECT_EQ(empty_like(there, {5}).dtype(), DType::i32);
  EXPECT_EQ(to_host(there).ptr<int32_t>()[7], 0);
}

TEST_F(TensorSpace, AddressesAreGivenToTheRightSideOnly) {
  const Tensor there = Tensor::zeros({2}, DType::f32, Space::device), here = Tensor::zeros({2});
  EXPECT_THROW(there.f32(), Error);
  EXPECT_THROW(there.ptr<float>(), Error);
  EXPECT_THROW(here.device<float>(), Error);
  EXPECT_THROW(there.device<int32_t>(), Error);
  EXPECT_NE(there.device<float>(), nullptr);
}

TEST_F(TensorSpace, MemoryIsGivenBack) {
  {
    const Tensor a = Tensor::empty({0}, DType::f32, Space::device), b = a.clone();
    EXPECT_TRUE(a.defined());
    EXPECT_EQ(device.alive(), 2);
  }
  EXPECT_EQ(device.alive(), 0);
  EXPECT_EQ(device.copied(), 0u);
}

TEST(TensorWithoutDevice, SaysWhatToDo) {
  try {
    Tensor::empty({1}, DType::f32, Space::device);
    FAIL();
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("PLUMB_CUDA"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace plumb
