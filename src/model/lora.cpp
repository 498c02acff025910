#include "model/lora.h"

namespace plumb {

const std::vector<std::string>& lora_targets() {
  static const std::vector<std::string> names = {
      "q_a_proj",  "q_b_proj", "kv_proj",   "o_a_proj", "o_b_proj", "compressor.kv_proj", "compressor.gate_proj",
      "gate_proj", "up_proj",  "down_proj", "experts"};
  return names;
}

}  // namespace plumb
