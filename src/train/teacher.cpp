#include "train/teacher.h"

#include <fmt/format.h>

#include <filesystem>

#include "base/error.h"
#include "model/adapter_files.h"

namespace plumb {
namespace {

constexpr const char* kSameVocabulary =
    "distillation compares probabilities token by token: take a teacher with the student's vocabulary";

void require_same_vocabulary(const std::string& folder, const ModelConfig& teacher, const ModelConfig& student,
                             const Tokenizer* tokenizer) {
  if (teacher.vocab_size != student.vocab_size)
    fail(folder,
         fmt::format("has a vocabulary of {} tokens, the student of {}", teacher.vocab_size, student.vocab_size),
         kSameVocabulary);
  const auto file = std::filesystem::path(folder) / "tokenizer.json";
  if (!tokenizer || !std::filesystem::exists(file)) return;
  const Tokenizer other = Tokenizer::load(file);
  for (int id = 0; id < std::max(tokenizer->vocab_size(), other.vocab_size()); ++id) {
    const auto bytes = [id](const Tokenizer& t) { return id < t.vocab_size() ? t.id_to_bytes(id) : std::string(); };
    if (bytes(other) != bytes(*tokenizer))
      fail(file.string(),
           fmt::format("token {} is \"{}\", the student's is \"{}\"", id, bytes(other), bytes(*tokenizer)),
           kSameVocabulary);
  }
}

}  // namespace

std::optional<Teacher> load_teacher(const RunConfig& config, std::shared_ptr<WeightStore> student,
                                    const Tokenizer* tokenizer) {
  const DistillKeys& keys = config.distill;
  if (keys.coefficient == 0) return {};
  Teacher t;
  t.weights = std::move(student);
  if (!keys.teacher_model.empty()) {
    std::shared_ptr<ResidentWeights> own = load_weights(Checkpoint::open(keys.teacher_model));
    require_same_vocabulary(keys.teacher_model, own->model, t.weights->config(), tokenizer);
    t.weights = std::move(own);
  }
  if (!keys.teacher_adapter.empty())
    t.adapters.parts.push_back({load_adapter(keys.teacher_adapter, t.weights->config()), {}, true, nullptr});
  t.divergence = keys.divergence == "forward_kl" ? ops::Divergence::forward_kl : ops::Divergence::reverse_kl;
  t.coefficient = keys.coefficient;
  return t;
}

}  // namespace plumb
