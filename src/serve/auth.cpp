#include "serve/auth.h"

#include <algorithm>
#include <sstream>

#include "base/error.h"
#include "base/files.h"

namespace plumb::serve {

std::vector<std::string> read_keys(const std::string& path) {
  std::istringstream in(read_text(path));
  std::vector<std::string> keys;
  std::string line;
  for (int number = 1; std::getline(in, line); ++number) {
    line.erase(line.find_last_not_of(" \t\r") + 1);
    line.erase(0, line.find_first_not_of(" \t"));
    if (line.empty() || line[0] == '#') continue;
    if (std::any_of(line.begin(), line.end(), [](char c) { return c <= ' ' || c > '~'; }))
      fail(path + ":" + std::to_string(number), "the key has a character that no HTTP header can carry",
           "use letters, digits and punctuation of ASCII, one key a line");
    keys.push_back(line);
  }
  if (keys.empty()) fail(path, "has no key", "write one key a line");
  return keys;
}

bool is_key(const std::vector<std::string>& keys, std::string_view given) {
  bool found = false;
  for (const std::string& key : keys) {
    unsigned different = key.size() != given.size();
    for (size_t i = 0; i < given.size(); ++i)
      different |= static_cast<unsigned char>(given[i]) ^ static_cast<unsigned char>(key[i % key.size()]);
    found |= different == 0;
  }
  return found;
}

std::string_view key_of(const HttpRequest& request) {
  static constexpr std::string_view scheme = "bearer ";
  const std::string_view value = request.header("Authorization");
  const auto same = [](char a, char b) { return (a >= 'A' && a <= 'Z' ? a + 32 : a) == b; };
  if (value.size() < scheme.size() ||
      !std::equal(scheme.begin(), scheme.end(), value.begin(), [&](char b, char a) { return same(a, b); }))
    return request.header("x-api-key");
  return value.substr(std::min(value.size(), value.find_first_not_of(' ', scheme.size())));
}

}  // namespace plumb::serve
