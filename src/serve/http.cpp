// A connection is a coroutine on a strand of its own: everything that belongs to it runs one piece at a time on one of
// the network threads, so nothing in Session is locked.
#include "serve/http.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <atomic>
#include <boost/asio.hpp>
#include <boost/asio/experimental/as_tuple.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/error.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/string_body.hpp>
#include <mutex>
#include <set>
#include <thread>

#include "base/error.h"
#include "base/log.h"

namespace plumb::serve {
namespace {

namespace asio = boost::asio;
namespace http = boost::beast::http;
using asio::ip::tcp;
using boost::system::error_code;
using std::chrono::milliseconds;
using Timer = asio::steady_timer;
// co_await gives error codes instead of throwing them. It always has a statement of its own here: g++ 12 miscompiles
// some conditions with a co_await inside.
constexpr auto kAwait = asio::experimental::as_tuple(asio::use_awaitable);

constexpr size_t kReadAhead = size_t{64} << 10;  // of what a client sends before its answer is complete
constexpr milliseconds kLinger{2'000};           // for a client to read an error while it still sends

HttpReply plain_error(int status, const std::string& message) { return {status, "text/plain", message + "\n"}; }

// Without host, split at the question mark.
void set_target(HttpRequest& r, std::string_view target) {
  if (const size_t scheme = target.find("://"); scheme != std::string_view::npos && !target.starts_with('/')) {
    const size_t slash = target.find('/', scheme + 3);
    target = slash == std::string_view::npos ? "/" : target.substr(slash);
  }
  const size_t question = target.find('?');
  r.path = target.substr(0, question);
  if (question != std::string_view::npos) r.query = target.substr(question + 1);
}

std::string head_text(const HttpReply& r, bool chunked, bool keep_alive) {
  std::string out = fmt::format("HTTP/1.1 {} {}\r\nDate: {:%a, %d %b %Y %H:%M:%S} GMT\r\n", r.status,
                                reason_phrase(r.status), fmt::gmtime(std::time(nullptr)));
  if (!r.type.empty()) out += "Content-Type: " + r.type + "\r\n";
  for (const auto& [name, value] : r.headers) out += name + ": " + value + "\r\n";
  if (chunked)
    out += "Transfer-Encoding: chunked\r\n";
  else if (!r.open && r.status != 204)
    out += fmt::format("Content-Length: {}\r\n", r.body.size());
  out += keep_alive ? "Connection: keep-alive\r\n\r\n" : "Connection: close\r\n\r\n";
  return out;
}

// What the parser found wrong, for the client.
std::pair<int, std::string> describe(const error_code& error, const HttpOptions& o) {
  if (error == http::error::body_limit)
    return {413,
            fmt::format("the body is larger than {} bytes; send less, or start the server with a larger --max-body",
                        o.max_body)};
  if (error == http::error::header_limit || error == http::error::buffer_overflow)
    return {431, fmt::format("the header is larger than {} bytes", o.max_header)};
  return {400, "malformed HTTP: " + error.message()};
}

}  // namespace

std::string_view HttpRequest::header(std::string_view name) const {
  for (const auto& [key, value] : headers)
    if (boost::beast::iequals(key, name)) return value;
  return {};
}

std::string_view reason_phrase(int status) {
  const auto text = http::obsolete_reason(static_cast<http::status>(status));
  return {text.data(), text.size()};
}

namespace {
class Session;
}

struct HttpServer::State {
  State(HttpOptions o, Handler h)
      : options(std::move(o)),
        handler(std::move(h)),
        control(asio::make_strand(io)),
        acceptor(control),
        grace(control),
        signals(control) {}

  asio::awaitable<void> accept();
  void stop();
  void close_sessions(bool busy_ones);
  void session_ended(Session* session);
  HttpReply error(const std::string& path, int status, const std::string& message) const {
    return options.error ? options.error(path, status, message) : plain_error(status, message);
  }

  HttpOptions options;
  Handler handler;
  asio::io_context io;
  asio::strand<asio::io_context::executor_type> control;  // of the three below
  tcp::acceptor acceptor;
  Timer grace;
  asio::signal_set signals;
  int port = 0;
  std::atomic<bool> stopping = false;
  std::mutex mutex;  // of all below
  std::set<Session*> sessions;
};

namespace {

class Session : public std::enable_shared_from_this<Session> {
 public:
  Session(tcp::socket socket, HttpServer::State& server)
      : socket_(std::move(socket)),
        server_(server),
        signal_(socket_.get_executor()),
        deadline_(socket_.get_executor()) {
    error_code ignored;
    socket_.set_option(tcp::no_delay(true), ignored);
  }
  ~Session() { server_.session_ended(this); }

  asio::awaitable<void> run();
  // Says that the server has too many connections.
  asio::awaitable<void> refuse();
  // Any thread. busy_too: also in the middle of an answer.
  void end(bool busy_too) {
    asio::post(socket_.get_executor(), [self = shared_from_this(), busy_too] {
      if (busy_too || !self->busy_) self->close();
    });
  }

 private:
  using Parser = http::request_parser<http::string_body>;
  asio::awaitable<bool> serve_one();
  asio::awaitable<error_code> read(Parser& parser);
  asio::awaitable<bool> write_answer(Answer& answer);
  asio::awaitable<bool> write_body(Answer& answer);
  asio::awaitable<bool> write_reply(const HttpReply& reply);
  asio::awaitable<bool> write(std::vector<asio::const_buffer> pieces);
  asio::awaitable<bool> write_piece(std::string_view piece);
  asio::awaitable<bool> sleep(std::optional<milliseconds> most);
  asio::awaitable<void> linger();

  Wake wake();
  void watch();
  asio::awaitable<void> stop_watching();
  void set_deadline(milliseconds from_now);
  void clear_deadline() { ++deadline_number_, deadline_.cancel(); }
  void close() {
    gone_ = true;
    error_code ignored;
    socket_.close(ignored);
    signal_.cancel();
  }

  tcp::socket socket_;
  HttpServer::State& server_;
  boost::beast::flat_buffer buffer_;  // read, but not parsed
  Timer signal_;                      // cancelled to wake the coroutine
  Timer deadline_;
  uint64_t deadline_number_ = 0;
  bool woken_ = false;     // since the coroutine looked last
  bool watching_ = false;  // a read is pending whose only purpose is to notice that the client goes
  bool watch_on_ = false;
  bool gone_ = false;
  bool busy_ = false;  // a request has begun
  // Of the request that is being answered.
  std::string path_;
  bool keep_alive_ = false, chunks_ = false, head_only_ = false, begun_ = false;
};

Wake Session::wake() {
  return [weak = weak_from_this(), executor = socket_.get_executor()] {
    asio::post(executor, [weak] {
      const auto self = weak.lock();
      if (!self) return;
      self->woken_ = true;
      self->signal_.cancel();
    });
  };
}

// A deadline that passes closes the socket, which ends whatever waits for it.
void Session::set_deadline(milliseconds from_now) {
  deadline_.expires_after(from_now);
  deadline_.async_wait([weak = weak_from_this(), number = ++deadline_number_](error_code error) {
    const auto self = weak.lock();
    if (self && !error && number == self->deadline_number_) self->close();
  });
}

// Until woken, gone, or `most` is over. -> woken
asio::awaitable<bool> Session::sleep(std::optional<milliseconds> most) {
  if (!woken_ && !gone_) {
    if (most)
      signal_.expires_after(*most);
    else
      signal_.expires_at(Timer::time_point::max());
    co_await signal_.async_wait(kAwait);
  }
  co_return std::exchange(woken_, false);
}

// A read that is always pending while an answer is made: it ends when the client goes away. What the client sends
// meanwhile belongs to its next request.
void Session::watch() {
  watch_on_ = true;
  if (watching_ || buffer_.size() >= kReadAhead) return;
  watching_ = true;
  socket_.async_read_some(buffer_.prepare(4096), [self = shared_from_this()](error_code error, size_t bytes) {
    self->watching_ = false;
    if (!error) {
      self->buffer_.commit(bytes);
      if (self->watch_on_) self->watch();
    } else if (error != asio::error::operation_aborted) {
      self->close();
    }
    if (!self->watch_on_) self->signal_.cancel();
  });
}

asio::awaitable<void> Session::stop_watching() {
  watch_on_ = false;
  error_code ignored;
  socket_.cancel(ignored);
  while (watching_) {
    signal_.expires_at(Timer::time_point::max());
    co_await signal_.async_wait(kAwait);
  }
}

asio::awaitable<bool> Session::write(std::vector<asio::const_buffer> pieces) {
  set_deadline(server_.options.write_timeout);
  const auto [error, bytes] = co_await asio::async_write(socket_, pieces, kAwait);
  clear_deadline();
  if (error) close();
  co_return !error;
}

asio::awaitable<bool> Session::write_reply(const HttpReply& reply) {
  begun_ = true;
  if (server_.options.replied) server_.options.replied(path_, reply.status);
  const std::string head = head_text(reply, reply.open && chunks_, keep_alive_);
  std::vector<asio::const_buffer> pieces = {asio::buffer(head)};
  if (!reply.open && !head_only_) pieces.push_back(asio::buffer(reply.body));
  const bool written = co_await write(pieces);
  if (!written || !reply.open || head_only_) co_return written;
  co_return co_await write_piece(reply.body);
}

// A piece of an open body; clients of HTTP/1.0 know no chunks and read until the connection is closed.
asio::awaitable<bool> Session::write_piece(std::string_view piece) {
  if (piece.empty()) co_return true;  // an empty chunk would be the last one
  const std::string size = fmt::format("{:x}\r\n", piece.size());
  std::vector<asio::const_buffer> pieces = {asio::buffer(piece)};
  if (chunks_) pieces = {asio::buffer(size), asio::buffer(piece), asio::buffer("\r\n", 2)};
  co_return co_await write(pieces);
}

asio::awaitable<bool> Session::write_body(Answer& answer) {
  std::vector<asio::const_buffer> end;
  while (!gone_) {
    std::string out;
    bool done = answer.more(out);
    if (out.empty() && !done) {
      const bool woken = co_await sleep(server_.options.quiet);
      if (!woken && !gone_) answer.quiet(out);
    }
    const bool written = co_await write_piece(out);
    if (!written) co_return false;
    if (!done) continue;
    if (chunks_) end.push_back(asio::buffer("0\r\n\r\n", 5));
    co_return co_await write(end);
  }
  co_return false;
}

asio::awaitable<bool> Session::write_answer(Answer& answer) {
  watch();
  std::optional<HttpReply> reply;
  while (!gone_ && !(reply = answer.reply())) co_await sleep({});
  if (gone_) co_return false;
  if (reply->open && !chunks_) keep_alive_ = false;
  const bool written = co_await write_reply(*reply);
  if (!written || !reply->open || head_only_) co_return written;
  co_return co_await write_body(answer);
}

// Reads a request. The header is judged before the client is told to go on with the body.
asio::awaitable<error_code> Session::read(Parser& parser) {
  if (buffer_.size() == 0) {
    set_deadline(server_.options.idle_timeout);
    const auto [error] = co_await socket_.async_wait(tcp::socket::wait_read, kAwait);
    if (error) co_return error;
  }
  busy_ = true;
  set_deadline(server_.options.read_timeout);
  {
    const auto [error, bytes] = co_await http::async_read_header(socket_, buffer_, parser, kAwait);
    if (error) co_return error;
  }
  if (boost::beast::iequals(parser.get()[http::field::expect], "100-continue")) {
    static constexpr std::string_view go_on = "HTTP/1.1 100 Continue\r\n\r\n";
    const auto [error, bytes] = co_await asio::async_write(socket_, asio::buffer(go_on), kAwait);
    if (error) co_return error;
  }
  const auto [error, bytes] = co_await http::async_read(socket_, buffer_, parser, kAwait);
  clear_deadline();
  co_return error;
}

// -> whether the connection can take another request
asio::awaitable<bool> Session::serve_one() {
  Parser parser;
  parser.header_limit(static_cast<uint32_t>(server_.options.max_header));
  parser.body_limit(server_.options.max_body);
  const error_code error = co_await read(parser);
  HttpRequest request;
  set_target(request, {parser.get().target().data(), parser.get().target().size()});
  path_ = request.path;
  if (error) {
    // Nobody to answer: the client left, sent nothing, or was too slow.
    if (gone_ || error.category() != make_error_code(http::error::end_of_stream).category() ||
        error == http::error::end_of_stream || error == http::error::partial_message)
      co_return false;
    const auto [status, message] = describe(error, server_.options);
    keep_alive_ = false;
    const HttpReply reply = server_.error(path_, status, message);
    const bool written = co_await write_reply(reply);
    if (written) co_await linger();
    co_return false;
  }
  auto& message = parser.get();
  keep_alive_ = message.keep_alive() && !server_.stopping;
  chunks_ = message.version() >= 11;
  head_only_ = message.method() == http::verb::head;
  request.method = message.method_string();
  for (const auto& f : message) request.headers.emplace_back(std::string(f.name_string()), std::string(f.value()));
  request.body = std::move(message.body());

  bool sent = false;
  std::optional<std::string> failure;
  begun_ = false;
  try {
    auto answered = server_.handler(std::move(request), wake());
    if (const auto* reply = std::get_if<HttpReply>(&answered)) {
      sent = co_await write_reply(*reply);
    } else {
      sent = co_await write_answer(*std::get<std::unique_ptr<Answer>>(answered));
    }
  } catch (const std::exception& e) {
    log_warning("{} failed: {}", path_, e.what());
    failure = e.what();
  }
  if (failure && !begun_ && !gone_) {
    const HttpReply reply = server_.error(path_, 500, *failure);
    sent = co_await write_reply(reply);
  }
  co_await stop_watching();
  const bool goes_on = sent && keep_alive_ && !gone_;
  co_return goes_on;
}

asio::awaitable<void> Session::run() {
  while (!gone_) {
    const bool more = co_await serve_one();
    if (!more || server_.stopping) break;
    busy_ = buffer_.size() > 0;
  }
  close();
}

asio::awaitable<void> Session::refuse() {
  busy_ = true;
  HttpReply reply = server_.error("", 503, "too many connections; try again later");
  reply.headers.emplace_back("Retry-After", "1");
  const bool written = co_await write_reply(reply);
  if (written) co_await linger();
  close();
}

asio::awaitable<void> run_session(std::shared_ptr<Session> session, bool refused) {
  if (refused)
    co_await session->refuse();
  else
    co_await session->run();
}

// Closing a socket with unread data resets the connection, and the client may lose what was written to it: so read on
// until it has seen the end.
asio::awaitable<void> Session::linger() {
  error_code error;
  socket_.shutdown(tcp::socket::shutdown_send, error);
  set_deadline(kLinger);
  std::vector<char> waste(size_t{16} << 10);
  while (!error) {
    const auto [failed, bytes] = co_await socket_.async_read_some(asio::buffer(waste), kAwait);
    error = failed;
  }
}

}  // namespace

void HttpServer::State::session_ended(Session* session) {
  const std::lock_guard lock(mutex);
  sessions.erase(session);
  if (stopping && sessions.empty()) asio::post(control, [this] { grace.cancel(), signals.cancel(); });
}

void HttpServer::State::close_sessions(bool busy_ones) {
  std::vector<std::shared_ptr<Session>> all;
  {
    const std::lock_guard lock(mutex);
    for (Session* s : sessions)
      if (auto held = s->weak_from_this().lock()) all.push_back(std::move(held));
  }
  for (const auto& s : all) s->end(busy_ones);
}

asio::awaitable<void> HttpServer::State::accept() {
  while (!stopping) {
    auto [error, socket] = co_await acceptor.async_accept(asio::make_strand(io), kAwait);
    if (stopping || error == asio::error::operation_aborted) co_return;
    if (error) {  // out of file descriptors: wait until some connection ends
      Timer pause(control, milliseconds(50));
      co_await pause.async_wait(kAwait);
      continue;
    }
    const auto executor = socket.get_executor();
    auto session = std::make_shared<Session>(std::move(socket), *this);
    size_t count;
    {
      const std::lock_guard lock(mutex);
      sessions.insert(session.get());
      count = sessions.size();
    }
    const size_t most = static_cast<size_t>(options.max_connections);
    if (count > 2 * most) continue;  // not even told
    asio::co_spawn(executor, run_session(std::move(session), count > most), asio::detached);
  }
}

void HttpServer::State::stop() {
  const bool again = stopping.exchange(true);
  error_code ignored;
  acceptor.close(ignored);
  close_sessions(again);
  const std::lock_guard lock(mutex);
  if (sessions.empty()) return void(signals.cancel());
  if (again) return;
  grace.expires_after(options.grace);
  grace.async_wait([this](error_code error) {
    if (!error) close_sessions(true);
  });
}

HttpServer::HttpServer(const HttpOptions& options, Handler handler)
    : state_(std::make_unique<State>(options, std::move(handler))) {
  State& s = *state_;
  const std::string where = fmt::format("{}:{}", options.host, options.port);
  error_code error;
  const auto address = asio::ip::make_address(options.host, error);
  if (error) fail("--host", "'" + options.host + "' is no IP address", "for example 127.0.0.1, 0.0.0.0 or ::1");
  const tcp::endpoint endpoint(address, static_cast<uint16_t>(options.port));
  s.acceptor.open(endpoint.protocol(), error);
  if (!error) s.acceptor.set_option(asio::socket_base::reuse_address(true), error);
  if (!error) s.acceptor.bind(endpoint, error);
  if (!error) s.acceptor.listen(asio::socket_base::max_listen_connections, error);
  if (error)
    fail(where, "cannot be listened on: " + error.message(), "choose another --port or --host; --port 0 finds one");
  s.port = s.acceptor.local_endpoint().port();
  if (options.signals) {
    s.signals.add(SIGINT);
    s.signals.add(SIGTERM);
  }
}

HttpServer::~HttpServer() = default;

int HttpServer::port() const { return state_->port; }

int HttpServer::connections() const {
  const std::lock_guard lock(state_->mutex);
  return static_cast<int>(state_->sessions.size());
}

void HttpServer::run() {
  State& s = *state_;
  std::function<void()> wait_for_signal = [&] {
    s.signals.async_wait([&](error_code error, int) {
      if (error) return;
      log_info("stopping: {} connections; once more: at once", connections());
      wait_for_signal();
      s.stop();  // ends the wait once nobody is connected
    });
  };
  if (s.options.signals) wait_for_signal();
  asio::co_spawn(s.control, s.accept(), asio::detached);
  std::vector<std::jthread> threads;
  for (int i = 1; i < s.options.threads; ++i) threads.emplace_back([&] { s.io.run(); });
  s.io.run();
}

void HttpServer::stop() {
  asio::post(state_->control, [this] { state_->stop(); });
}

}  // namespace plumb::serve
