#include "gpu_bench.h"

#include <cstdio>
#include <ctime>

#include "base/files.h"
#include "flash_model.h"
#include "ops/device.h"

namespace plumb::bench {

double milliseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}
void wait_for_device() { to_host(to_device(Tensor::full({1}, 0))); }

int token(const ModelConfig& config, int64_t i) { return static_cast<int>((i * 131 + i * i * 7) % config.vocab_size); }

std::shared_ptr<DeviceWeights> four_layers() {
  ModelConfig c = testing::flash_config(256);
  c.index_topk = 512;
  return std::make_shared<DeviceWeights>(testing::flash_model(1, c));
}

int run_on_gpu(int argc, char** argv, Figures head, const std::function<Figures()>& measure,
               const std::function<int(int, char**)>& profile) {
  try {
    setvbuf(stdout, nullptr, _IOLBF, 0);
    const ops::DeviceStatus device = ops::open_device();
    if (!device.usable) {
      std::printf("skipped: %s\n", device.what.c_str());
      return 77;
    }
    if (argc > 1 && std::string(argv[1]) == "--step") return profile(argc, argv);
    char date[16];
    const std::time_t now = std::time(nullptr);
    std::strftime(date, sizeof date, "%F", std::gmtime(&now));
    head["date"] = date, head["device"] = device.what;
    head["figures"] = measure();
    if (argc > 1) write_text(argv[1], head.dump(2) + "\n");
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}

}  // namespace plumb::bench
