#include "reward/http.h"

#include <fmt/format.h>

#include <boost/asio/awaitable.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/connect.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http.hpp>
#include <chrono>
#include <cmath>
#include <thread>

#include "base/error.h"
#include "reward/json_text.h"
#include "reward/wire.h"

namespace plumb {
namespace {

namespace asio = boost::asio;
namespace http = boost::beast::http;
using asio::ip::tcp;

struct Url {
  std::string host, port = "80", target = "/";
};

Url parse_url(const std::string& text, const std::string& where) {
  constexpr std::string_view kScheme = "http://";
  const auto refuse = [&] { fail(where, "url " + text + " is not http://host[:port]/path"); };
  if (!text.starts_with(kScheme)) refuse();
  Url url;
  std::string rest = text.substr(kScheme.size());
  if (const size_t slash = rest.find_first_of("/?"); slash != std::string::npos) {
    url.target = (rest[slash] == '?' ? "/" : "") + rest.substr(slash);
    rest.resize(slash);
  }
  const size_t colon = rest.rfind(':');
  if (colon != std::string::npos && rest.find(']', colon) == std::string::npos) {  // not one inside of [::1]
    url.port = rest.substr(colon + 1);
    rest.resize(colon);
    if (url.port.empty() || url.port.find_first_not_of("0123456789") != std::string::npos) refuse();
  }
  if (rest.starts_with('[') && rest.ends_with(']')) rest = rest.substr(1, rest.size() - 2);
  if (rest.empty() || rest.find_first_of(" @") != std::string::npos) refuse();
  url.host = rest;
  return url;
}

using Request = http::request<http::string_body>;

struct Response {
  unsigned status = 0;
  std::string body;
};

asio::awaitable<Response> exchange(const Url& url, const Request& request, uint64_t max_body) {
  const auto executor = co_await asio::this_coro::executor;
  tcp::resolver resolver(executor);
  const auto places = co_await resolver.async_resolve(url.host, url.port, asio::use_awaitable);
  tcp::socket socket(executor);
  co_await asio::async_connect(socket, places, asio::use_awaitable);
  co_await http::async_write(socket, request, asio::use_awaitable);
  boost::beast::flat_buffer buffer;
  http::response_parser<http::string_body> parser;
  parser.body_limit(max_body);
  co_await http::async_read(socket, buffer, parser, asio::use_awaitable);
  co_return Response{parser.get().result_int(), parser.get().body()};
}

// Worth another attempt: the connection or the server failed, not the request.
class Unavailable : public Error {
  using Error::Error;
};

class HttpReward : public Reward {
 public:
  HttpReward(const HttpKeys& keys, const std::string& where) : keys_(keys), url_(parse_url(keys.url, where)) {}

  Score score(const RewardSample& sample) override {
    Request request(http::verb::post, url_.target, 11);
    const bool v6 = url_.host.find(':') != std::string::npos;
    request.set(http::field::host, fmt::format("{0}{1}{2}:{3}", v6 ? "[" : "", url_.host, v6 ? "]" : "", url_.port));
    request.set(http::field::content_type, "application/json");
    request.set(http::field::connection, "close");
    for (const auto& [name, value] : keys_.headers) request.set(name, value);
    request.body() = json_line(sample_to_json(sample));
    request.prepare_payload();
    for (int64_t attempt = 0;; ++attempt) {
      try {
        return read(post(request));
      } catch (const Unavailable& e) {
        if (attempt == keys_.retries) fail(e.where(), fmt::format("{} attempts, the last: {}", attempt + 1, e.fix()));
        std::this_thread::sleep_for(
            std::chrono::duration<double>(std::ldexp(keys_.retry_delay, static_cast<int>(attempt))));
      }
    }
  }

 private:
  // The whole exchange within the time limit, on an event loop of this thread.
  Response post(const Request& request) const {
    Response response;
    std::exception_ptr error;
    bool done = false;
    asio::io_context loop(1);
    asio::co_spawn(loop, exchange(url_, request, static_cast<uint64_t>(keys_.max_body)),
                   [&](std::exception_ptr e, Response r) {
                     done = true;
                     error = e;
                     response = std::move(r);
                   });
    loop.run_for(std::chrono::duration_cast<std::chrono::nanoseconds>(
        std::chrono::duration<double>(std::min(keys_.time_limit, 1e6))));
    if (!done) fail(keys_.url, fmt::format("no answer within {} s", keys_.time_limit));
    if (!error) return response;
    try {
      std::rethrow_exception(error);
    } catch (const boost::system::system_error& e) {
      if (e.code() == http::error::body_limit)
        fail(keys_.url, fmt::format("answered with more than {} bytes", keys_.max_body));
      throw Unavailable(keys_.url, "unavailable", e.code().message());
    }
  }

  Score read(const Response& response) const {
    const std::string what = fmt::format("status {}: {}", response.status, shortened(response.body));
    if (response.status >= 500) throw Unavailable(keys_.url, "unavailable", what);
    if (response.status / 100 != 2) fail(keys_.url, what);
    const auto reply = parse_json_text(response.body);
    if (!reply) fail(keys_.url, "answered with no JSON: " + shortened(response.body));
    return read_score(*reply, keys_.url);
  }

  HttpKeys keys_;
  Url url_;
};

}  // namespace

std::unique_ptr<Reward> make_http_reward(const HttpKeys& keys, const std::string& where) {
  return std::make_unique<HttpReward>(keys, where);
}

}  // namespace plumb
