// The one exception type of the program: what went wrong, where, and what the user can do about it.
#pragma once
#include <stdexcept>
#include <string>

namespace plumb {

// what() reads "where: what (fix)". Exit code of the program: 1.
class Error : public std::runtime_error {
 public:
  Error(std::string where, std::string what, std::string fix = "");
  const std::string& where() const { return where_; }
  const std::string& fix() const { return fix_; }

 private:
  std::string where_, fix_;
};

// Wrong use of the command line. Exit code 2.
class UsageError : public Error {
  using Error::Error;
};

// where: file, file:line, tensor name or option; what: one sentence with the offending value; fix: what to do, may be
// empty.
[[noreturn]] void fail(std::string where, std::string what, std::string fix = "");

// For conditions that only a defect of the program can break. Throws Error with the source position.
#define PLUMB_CHECK(condition, ...)                                                                     \
  do {                                                                                                  \
    if (!(condition)) ::plumb::check_failed(__FILE__, __LINE__, #condition __VA_OPT__(, ) __VA_ARGS__); \
  } while (false)
[[noreturn]] void check_failed(const char* file, int line, const char* condition, const std::string& detail = "");

}  // namespace plumb
