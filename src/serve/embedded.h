// Files of src/serve that are part of the program (cmake/embed.cmake).
#pragma once
#include <string_view>

namespace plumb::serve {

// By its name, for example "page.html"; "" if there is no such file.
std::string_view embedded_file(std::string_view name);

}  // namespace plumb::serve
