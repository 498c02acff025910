#include "train/rollout_log.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>

#include "base/error.h"
#include "base/files.h"
#include "base/hash.h"

namespace plumb {
namespace {

// A record: length of the payload, its checksum, the payload (kind, sample, data). Machine's byte order: the file lives
// as long as a step.
struct RecordHead {
  uint32_t bytes, checksum;
};
struct PayloadHead {
  uint32_t sample;
  uint8_t kind;
};
constexpr size_t kPayloadHead = sizeof(uint32_t) + sizeof(uint8_t);

uint32_t checksum_of(const char* data, size_t bytes) {
  return static_cast<uint32_t>(mix_bits(hash_bytes(data, bytes)));
}

struct TokenRecord {
  int32_t id;
  float logprob;
  int32_t finish;
};

}  // namespace

int LoggedSample::open_tokens() const {
  int open = 0;
  for (size_t i = tokens.size();
       i > (turn_end.empty() ? 0 : static_cast<size_t>(turn_end.back())) && policy_made(i - 1); --i)
    ++open;
  return open;
}

bool LoggedSample::policy_made(size_t i) const { return !std::isnan(logprob[i]); }

RolloutLog::RolloutLog(std::string path, size_t samples, uint64_t fingerprint)
    : path_(std::move(path)), samples_(samples) {
  const size_t valid = std::filesystem::exists(path_) ? read(read_text(path_), fingerprint) : 0;
  fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
  if (fd_ < 0 || ::ftruncate(fd_, static_cast<off_t>(valid)) != 0 || ::lseek(fd_, 0, SEEK_END) < 0)
    fail(path_, std::string("cannot be written: ") + std::strerror(errno),
         "check the folder and the space on the disk");
  if (valid == 0) append(Kind::header, 0, &fingerprint, sizeof fingerprint);
  flush();
}

RolloutLog::~RolloutLog() {
  if (fd_ >= 0) ::close(fd_);
}

// -> bytes of valid records; 0 if the file is of another batch.
size_t RolloutLog::read(const std::string& text, uint64_t fingerprint) {
  size_t at = 0;
  while (at + sizeof(RecordHead) <= text.size()) {
    RecordHead head;
    std::memcpy(&head, text.data() + at, sizeof head);
    const char* payload = text.data() + at + sizeof head;
    if (head.bytes < kPayloadHead || head.bytes > text.size() - at - sizeof head) break;
    if (checksum_of(payload, head.bytes) != head.checksum) break;
    uint32_t sample;
    std::memcpy(&sample, payload, sizeof sample);
    const auto kind = static_cast<Kind>(payload[sizeof sample]);
    const char* data = payload + kPayloadHead;
    const size_t bytes = head.bytes - kPayloadHead;
    if (at == 0) {
      if (kind != Kind::header || bytes != sizeof fingerprint || std::memcmp(data, &fingerprint, bytes) != 0) return 0;
    } else if (!apply(kind, sample, data, bytes)) {
      break;
    }
    at += sizeof head + head.bytes;
  }
  resumed_ = at > 0;
  return at;
}

bool RolloutLog::apply(Kind kind, size_t sample, const char* data, size_t bytes) {
  if (sample >= samples_.size()) return false;
  LoggedSample& s = samples_[sample];
  if (kind == Kind::token && bytes == sizeof(TokenRecord)) {
    TokenRecord t;
    std::memcpy(&t, data, sizeof t);
    s.tokens.push_back(t.id);
    s.logprob.push_back(t.logprob);
    if (static_cast<Finish>(t.finish) != Finish::none) {
      s.turn_end.push_back(static_cast<int>(s.tokens.size()));
      s.finish.push_back(static_cast<Finish>(t.finish));
    }
  } else if (kind == Kind::reply && bytes % sizeof(int32_t) == 0) {
    for (size_t i = 0; i < bytes; i += sizeof(int32_t)) {
      int32_t id;
      std::memcpy(&id, data + i, sizeof id);
      s.tokens.push_back(id);
      s.logprob.push_back(std::numeric_limits<float>::quiet_NaN());
    }
  } else if (kind == Kind::reward) {
    s.reward = std::string(data, bytes);
  } else if (kind == Kind::routed && bytes % sizeof(uint16_t) == 0) {
    s.routed.resize(bytes / sizeof(uint16_t));
    std::memcpy(s.routed.data(), data, bytes);
  } else {
    return false;
  }
  return true;
}

void RolloutLog::append(Kind kind, size_t sample, const void* data, size_t bytes) {
  std::string payload(kPayloadHead, '\0');
  const auto number = static_cast<uint32_t>(sample);
  std::memcpy(payload.data(), &number, sizeof number);
  payload[sizeof number] = static_cast<char>(kind);
  payload.append(static_cast<const char*>(data), bytes);
  const RecordHead head{static_cast<uint32_t>(payload.size()), checksum_of(payload.data(), payload.size())};
  buffer_.append(reinterpret_cast<const char*>(&head), sizeof head);
  buffer_ += payload;
  if (kind != Kind::header) PLUMB_CHECK(apply(kind, sample, static_cast<const char*>(data), bytes));
}

void RolloutLog::add_token(size_t sample, int id, float logprob, Finish finish) {
  const TokenRecord t{id, logprob, static_cast<int32_t>(finish)};
  append(Kind::token, sample, &t, sizeof t);
}
void RolloutLog::add_reply(size_t sample, const std::vector<int>& tokens) {
  const std::vector<int32_t> ids(tokens.begin(), tokens.end());
  append(Kind::reply, sample, ids.data(), ids.size() * sizeof(int32_t));
}
void RolloutLog::set_reward(size_t sample, const std::string& json) {
  append(Kind::reward, sample, json.data(), json.size());
}
void RolloutLog::set_routed(size_t sample, const std::vector<uint16_t>& experts) {
  append(Kind::routed, sample, experts.data(), experts.size() * sizeof(uint16_t));
}

void RolloutLog::flush() {
  const char* at = buffer_.data();
  size_t left = buffer_.size();
  while (left > 0) {
    const ssize_t written = ::write(fd_, at, left);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0)
      fail(path_, std::string("cannot be written: ") + std::strerror(errno), "check the space on the disk");
    at += written;
    left -= static_cast<size_t>(written);
  }
  buffer_.clear();
}

}  // namespace plumb
