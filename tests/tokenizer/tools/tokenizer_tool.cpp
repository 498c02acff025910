// A tokenizer.json behind a pipe, for tests/oracle/test_tokenizer.py. usage: tokenizer_tool FILE MODE < records >
// records MODE added | plain: a record is UTF-8 text, the answer its int32 ids. MODE decode | decode_skip | stream: the
// other way round. A record is its length in bytes (uint32, little endian) and the bytes. An Error is answered by its
// text on stderr.
#include <cstdio>
#include <cstring>
#include <iostream>
#include <iterator>

#include "base/error.h"
#include "tokenizer/tokenizer.h"

namespace plumb {
namespace {

std::string answer(const Tokenizer& tokenizer, const std::string& mode, std::string_view record) {
  if (mode == "added" || mode == "plain") {
    const std::vector<int32_t> ids = tokenizer.encode(record, mode == "added");
    return {reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(int32_t)};
  }
  std::vector<int32_t> ids(record.size() / sizeof(int32_t));
  std::memcpy(ids.data(), record.data(), ids.size() * sizeof(int32_t));
  if (mode != "stream") return tokenizer.decode(ids, mode == "decode_skip");
  StreamDecoder stream(tokenizer, false);
  std::string text;
  for (const int32_t id : ids) text += stream.push(id);
  return text + stream.finish();
}

int run(const std::string& file, const std::string& mode) {
  const Tokenizer tokenizer = Tokenizer::load(file);
  std::ios::sync_with_stdio(false);
  const std::string input{std::istreambuf_iterator<char>(std::cin), {}};
  for (size_t at = 0; at + 4 <= input.size();) {
    uint32_t size;
    std::memcpy(&size, input.data() + at, 4);
    const std::string out = answer(tokenizer, mode, std::string_view(input).substr(at + 4, size));
    const auto out_size = static_cast<uint32_t>(out.size());
    std::cout.write(reinterpret_cast<const char*>(&out_size), 4);
    std::cout.write(out.data(), out_size);
    at += 4 + size;
  }
  return 0;
}

}  // namespace
}  // namespace plumb

int main(int argc, char** argv) {
  try {
    if (argc == 3) return plumb::run(argv[1], argv[2]);
    std::fprintf(stderr, "usage: tokenizer_tool FILE added|plain|decode|decode_skip|stream\n");
    return 2;
  } catch (const plumb::Error& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
