// Reading requests: members of JSON objects, checked one by one, and the fields that all protocols share. Every error
// is an ApiError that names the JSON path, the value and the fix.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "serve/exchange.h"
#include "tokenizer/python_json.h"

namespace plumb::serve {

// Throws ApiError. field: JSON path, may be empty; what: one sentence with the offending value; fix: what to send.
[[noreturn]] void refuse(const std::string& field, const std::string& what, const std::string& fix, int status = 400);
// An Error of the rooms below (chat format, engine) that a request caused: its `where` is the field, unless the client
// knows it by another name.
ApiError api_error(const Error& e, int status = 400, const std::string& field = "");

// The body of a request: JSON text of an object.
Json parse_body(std::string_view body);

// Values that must be there; `path` names them in errors.
int64_t integer_at(const Json& value, const std::string& path, int64_t least, int64_t most);  // 5.0 is 5
double number_at(const Json& value, const std::string& path, double least, double most);
const std::string& string_at(const Json& value, const std::string& path);
const std::vector<Json>& list_at(const Json& value, const std::string& path);
std::vector<int> token_ids_at(const Json& value, const std::string& path, int vocab);

// One JSON object of a request. Members that are absent or null count as not given. Remembers which names it was asked
// for: the others are unknown.
class Fields {
 public:
  // path: of the object, empty for the body. Error: no object.
  explicit Fields(const Json& object, std::string path = "");

  std::string path(std::string_view name) const;  // of a member
  const Json* find(std::string_view name) const;  // null if not given
  const Json& need(std::string_view name) const;  // Error: not given
  bool flag(std::string_view name, bool otherwise) const;
  std::optional<int64_t> integer(std::string_view name, int64_t least, int64_t most) const;
  std::optional<double> number(std::string_view name, double least, double most) const;
  std::optional<std::string> text(std::string_view name) const;
  // A string out of a list.
  std::optional<std::string> word(std::string_view name, const std::vector<std::string>& allowed) const;

  // Names that this server knows and has no use for.
  void ignore(std::initializer_list<std::string_view> names) const;
  // Error if a member is given (and is not false or an empty list) that would change the answer and cannot be done.
  void refuse_given(std::string_view name, const std::string& why, const std::string& fix) const;
  // Error if a member was never asked for; names the nearest known one.
  void refuse_unknown() const;

 private:
  const Json& object_;
  std::string path_;
  mutable std::vector<std::string> asked_;
};

// The tokens of a text that is a prompt as it stands. Control tokens may be spelled in it. Begin of sentence is put in
// front if it is not there, unless `add_special_tokens` is false.
std::vector<int> prompt_tokens(const Fields& body, const std::string& text, const ServedModel& model);

// What `model` says: the base model, an adapter, or an adapter's version ("name@7", unless an adapter has that very
// name).
struct ModelChoice {
  std::string spelled;  // as the client wrote it; the base model's name if it wrote nothing
  std::string adapter;  // empty: base model
  std::optional<int64_t> version;
};
// Error 404: unknown name or version; lists what there is.
ModelChoice read_model(const Fields& body, const ServedModel& model);

// What the protocols have in common, apart from the prompt.
struct AnswerFields {
  ModelChoice model;
  Request request;           // prompt and key are not set; max_tokens -1 = the client did not say
  std::string length_field;  // the name under which it gave max_tokens, or the first possible one
  int choices = 1;
  bool stream = false;
  bool stream_usage = false;      // stream_options.include_usage
  bool continuous_usage = false;  // stream_options.continuous_usage_stats: in every event
  bool skip_special = true;       // tokens with the flag `special` have no text
  bool return_token_ids = false;
  bool tokens_as_ids = false;  // return_tokens_as_token_ids: "token_id:7" for the token's text in log-probabilities
};
// length_names: how the protocol calls max_tokens, preferred name first. least_length: 1, or 0 if the protocol can ask
// for the prompt alone.
AnswerFields read_answer_fields(const Fields& body, const ServedModel& model,
                                std::initializer_list<std::string_view> length_names, int least_length = 1);

// Sets max_tokens if the client did not say. Error: the prompt alone, or with the answer asked for, is longer than the
// model can take; names prompt_field or length_field.
void fit_length(Request& request, const ServedModel& model, const std::string& prompt_field,
                const std::string& length_field);

// The same request once a choice, keys first_key, first_key + 1, ...
std::vector<Request> one_each(const Request& request, int choices, uint64_t first_key = 0);

}  // namespace plumb::serve
