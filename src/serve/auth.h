// Bearer keys.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "serve/http.h"

namespace plumb::serve {

// One key a line; blank lines and lines that begin with # are skipped. Errors: cannot be read, has no key, a key with
// characters that no header can carry.
std::vector<std::string> read_keys(const std::string& path);

// Whether `given` is one of the keys. The time depends on the length of `given` and on the keys, not on how much of a
// key was guessed, nor on which one it is.
bool is_key(const std::vector<std::string>& keys, std::string_view given);

// The key of a request: "Authorization: Bearer KEY" or, as Anthropic's clients send it, "x-api-key: KEY"; "" if none.
std::string_view key_of(const HttpRequest& request);

}  // namespace plumb::serve
