#include "base/error.h"

namespace plumb {
namespace {
std::string join(const std::string& where, const std::string& what, const std::string& fix) {
  std::string text = where.empty() ? what : where + ": " + what;
  if (!fix.empty()) text += " (" + fix + ")";
  return text;
}
}  // namespace

Error::Error(std::string where, std::string what, std::string fix)
    : std::runtime_error(join(where, what, fix)), where_(std::move(where)), fix_(std::move(fix)) {}

void fail(std::string where, std::string what, std::string fix) {
  throw Error(std::move(where), std::move(what), std::move(fix));
}

void check_failed(const char* file, int line, const char* condition, const std::string& detail) {
  throw Error(std::string(file) + ":" + std::to_string(line),
              std::string("internal check failed: ") + condition + (detail.empty() ? "" : ": " + detail),
              "this is a defect of plumb, please report it");
}

}  // namespace plumb
