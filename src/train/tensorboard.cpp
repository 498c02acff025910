#include "train/tensorboard.h"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <chrono>

#include "base/error.h"

namespace plumb {
namespace {

// ---- Protobuf wire format: a field is a key (number * 8 + wire type) and a value
// -------------------------------------

void put_varint(std::string& out, uint64_t value) {
  for (; value >= 128; value >>= 7) out += static_cast<char>(value | 128);
  out += static_cast<char>(value);
}
template <class T>
void put_fixed(std::string& out, T value) {  // little-endian
  for (size_t i = 0; i < sizeof(T); ++i) out += static_cast<char>(value >> (8 * i));
}
void field_varint(std::string& out, int number, uint64_t value) {
  put_varint(out, static_cast<uint64_t>(number) << 3);
  put_varint(out, value);
}
void field_double(std::string& out, int number, double value) {
  put_varint(out, static_cast<uint64_t>(number) << 3 | 1);
  put_fixed(out, std::bit_cast<uint64_t>(value));
}
void field_float(std::string& out, int number, float value) {
  put_varint(out, static_cast<uint64_t>(number) << 3 | 5);
  put_fixed(out, std::bit_cast<uint32_t>(value));
}
void field_bytes(std::string& out, int number, std::string_view value) {
  put_varint(out, static_cast<uint64_t>(number) << 3 | 2);
  put_varint(out, value.size());
  out += value;
}

// Event { double wall_time = 1; int64 step = 2; string file_version = 3; Summary summary = 5; SessionLog session_log =
// 7; }
std::string event(double wall_time, int64_t step) {
  std::string out;
  field_double(out, 1, wall_time);
  field_varint(out, 2, static_cast<uint64_t>(step));
  return out;
}

double now() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

uint32_t masked_crc(std::string_view data) {
  const uint32_t crc = crc32c(data);
  return std::rotr(crc, 15) + 0xa282ead8u;
}

}  // namespace

uint32_t crc32c(std::string_view data) {
  static const std::array<uint32_t, 256> table = [] {
    std::array<uint32_t, 256> t{};
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t r = i;
      for (int bit = 0; bit < 8; ++bit) r = r >> 1 ^ (r & 1 ? 0x82f63b78u : 0);
      t[i] = r;
    }
    return t;
  }();
  uint32_t crc = ~0u;
  for (unsigned char c : data) crc = crc >> 8 ^ table[(crc ^ c) & 255];
  return ~crc;
}

EventFile::EventFile(const std::string& folder, int64_t first_step) {
  char host[256] = "localhost";
  ::gethostname(host, sizeof host - 1);
  path_ = fmt::format("{}/events.out.tfevents.{:.0f}.{}.{}", folder, now() * 1e6, host, ::getpid());
  file_ = std::fopen(path_.c_str(), "wbxe");
  if (!file_) fail(path_, "the event file cannot be written", "check the folder and its permissions");
  std::string version = event(now(), 0);
  field_bytes(version, 3, "brain.Event:2");
  write_record(version);
  std::string start = event(now(), first_step), session;  // SessionLog { SessionStatus status = 1; } with START = 1
  field_varint(session, 1, 1);
  field_bytes(start, 7, session);
  write_record(start);
}

EventFile::~EventFile() { std::fclose(file_); }

void EventFile::add_scalars(int64_t step, double wall_time, const std::vector<std::pair<std::string, double>>& values) {
  std::string summary;  // Summary { repeated Value value = 1; }
  for (const auto& [name, value] : values) {
    std::string one;  // Value { string tag = 1; float simple_value = 2; }
    field_bytes(one, 1, name);
    field_float(one, 2, static_cast<float>(value));
    field_bytes(summary, 1, one);
  }
  std::string record = event(wall_time, step);
  field_bytes(record, 5, summary);
  write_record(record);
}

void EventFile::write_record(std::string_view data) {
  std::string length, record;
  put_fixed(length, static_cast<uint64_t>(data.size()));
  record = length;
  put_fixed(record, masked_crc(length));
  record += data;
  put_fixed(record, masked_crc(data));
  if (std::fwrite(record.data(), 1, record.size(), file_) != record.size() || std::fflush(file_) != 0)
    fail(path_, "cannot be written", "check that the disk is not full");
}

}  // namespace plumb
