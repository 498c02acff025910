// main of the model's GPU tests: without a GPU that the kernels run on they are skipped (exit code 77). --portable: all
// of it on the portable kernels.
#include <gtest/gtest.h>

#include <cstdio>
#include <string_view>

#include "kernels/device.h"
#include "ops/device.h"

int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);  // lines appear even if a kernel hangs
  testing::InitGoogleTest(&argc, argv);
  plumb::kernels::use_portable_for_test(argc > 1 && std::string_view(argv[1]) == "--portable");
  const plumb::ops::DeviceStatus device = plumb::ops::open_device();
  if (!device.usable) {
    std::printf("skipped: %s\n", device.what.c_str());
    return 77;
  }
  return RUN_ALL_TESTS();
}
