// The transport: an HTTP/1.1 server that knows nothing of models. A handler turns a request into a reply, or into an
// Answer which is written piece by piece while it is being made. Boost.Beast and Asio stay inside http.cpp.
#pragma once
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace plumb::serve {

using Headers = std::vector<std::pair<std::string, std::string>>;

struct HttpRequest {
  std::string method;  // as sent: GET, POST, ...
  std::string path;    // without query and host, percent-encoded as sent
  std::string query;   // behind the question mark
  Headers headers;
  std::string body;
  std::string_view header(std::string_view name) const;  // in any case; the first one; "" if there is none
};

struct HttpReply {
  int status = 200;
  std::string type = "application/json";
  std::string body = {};
  Headers headers = {};  // further ones; the transport writes Content-Type, Content-Length, Date, Connection
  bool open = false;     // the body goes on: Answer::more() gives the rest
};

// An answer in the making. Used by one thread at a time; destroyed when it is complete or when the client is gone, so
// the destructor gives up what is not needed any more.
class Answer {
 public:
  virtual ~Answer() = default;
  // The status line and the beginning of the body. nullopt: not known yet; asked again after a wake.
  virtual std::optional<HttpReply> reply() = 0;
  // After a reply with `open`: appends what there is to send; true: that was all. Asked again after a wake, and only
  // once everything before is written: what a slow client does not read stays with the Answer.
  virtual bool more(std::string& out) = 0;
  // Nothing was sent for HttpOptions::quiet: appends what tells the client that the answer is still alive.
  virtual void quiet(std::string& out) = 0;
};

// Makes the connection ask its Answer again. Any thread may call it, also after the connection has ended.
using Wake = std::function<void()>;
// Called by several threads at a time. What it throws is answered with status 500.
using Handler = std::function<std::variant<HttpReply, std::unique_ptr<Answer>>(HttpRequest request, Wake wake)>;

struct HttpOptions {
  std::string host = "127.0.0.1";  // address to listen on
  int port = 0;                    // 0: the system picks one
  int threads = 2;
  size_t max_header = size_t{16} << 10;             // bytes
  size_t max_body = size_t{32} << 20;               // bytes
  int max_connections = 4096;                       // more are answered with 503
  std::chrono::milliseconds read_timeout{30'000};   // of a whole request, from its first byte
  std::chrono::milliseconds idle_timeout{75'000};   // of a connection between requests
  std::chrono::milliseconds write_timeout{30'000};  // of one piece of an answer
  std::chrono::milliseconds quiet{10'000};
  std::chrono::milliseconds grace{10'000};  // for answers that are being written when the server is stopped
  bool signals = false;                     // SIGINT and SIGTERM stop the server; once more: at once
  // Writes an error that the transport found in the form that the clients of this path read; the path may be empty.
  std::function<HttpReply(const std::string& path, int status, const std::string& message)> error;
  std::function<void(const std::string& path, int status)> replied;  // hears of every reply that is sent; may be empty
};

class HttpServer {
 public:
  // Listens from now on. Errors: the address cannot be used.
  HttpServer(const HttpOptions& options, Handler handler);
  ~HttpServer();  // after run() has returned

  int port() const;
  int connections() const;  // open ones
  // Serves until it is stopped and the last answer is written or cut off.
  void run();
  // No further connections; idle ones are closed, answers get HttpOptions::grace. Any thread.
  void stop();

  struct State;  // of http.cpp

 private:
  std::unique_ptr<State> state_;
};

// "Not Found" for 404.
std::string_view reason_phrase(int status);

}  // namespace plumb::serve
