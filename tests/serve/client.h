// A client on a plain socket: sends bytes as they are given and reads replies by a parser of its own.
#pragma once
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <optional>
#include <string>

namespace plumb::testing {

struct Reply {
  int status = 0;
  std::map<std::string, std::string> headers;  // names in lower case
  std::string body;
};

class Client {
 public:
  explicit Client(int port) : fd_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const timeval patience{20, 0};  // a test that waits longer has failed
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    setsockopt(fd_, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    connected_ = connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
  }
  ~Client() { close(); }
  Client(const Client&) = delete;

  bool connected() const { return connected_; }
  int fd() const { return fd_; }
  void close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

  bool send(const std::string& bytes) {
    for (size_t sent = 0; sent < bytes.size();) {
      const ssize_t n = ::send(fd_, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
      if (n <= 0) return false;
      sent += static_cast<size_t>(n);
    }
    return true;
  }
  bool request(const std::string& method, const std::string& path, const std::string& body = "",
               const std::string& headers = "") {
    std::string text = method + " " + path + " HTTP/1.1\r\nHost: test\r\n" + headers;
    if (!body.empty())
      text += "Content-Type: application/json\r\nContent-Length: " + std::to_string(body.size()) + "\r\n";
    return send(text + "\r\n" + body);
  }

  // Everything up to and including `end`; nullopt if the connection ended before.
  std::optional<std::string> read_until(const std::string& end) {
    size_t at;
    while ((at = buffer_.find(end)) == std::string::npos)
      if (!fill()) return {};
    return take(at + end.size());
  }
  std::optional<std::string> read_bytes(size_t count) {
    while (buffer_.size() < count)
      if (!fill()) return {};
    return take(count);
  }
  std::string read_to_end() {
    while (fill()) {
    }
    return take(buffer_.size());
  }

  // Status line and headers.
  Reply read_head() {
    Reply r;
    const auto head = read_until("\r\n\r\n");
    if (!head) return r;
    r.status = std::stoi(head->substr(head->find(' ') + 1));
    for (size_t line = head->find("\r\n") + 2; line + 2 < head->size();) {
      const size_t end = head->find("\r\n", line), colon = head->find(": ", line);
      std::string name = head->substr(line, colon - line);
      std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
      r.headers[name] = head->substr(colon + 2, end - colon - 2);
      line = end + 2;
    }
    return r;
  }
  // One chunk of a chunked body; "" is the last one; nullopt: the connection ended.
  std::optional<std::string> read_chunk() {
    const auto size = read_until("\r\n");
    if (!size) return {};
    auto chunk = read_bytes(std::stoul(*size, nullptr, 16) + 2);
    if (chunk) chunk->resize(chunk->size() - 2);
    return chunk;
  }
  // head_only: a reply to HEAD. status 0: the connection ended before the reply was complete.
  Reply read_reply(bool head_only = false) {
    Reply r = read_head();
    if (r.status == 0 || head_only) return r;
    if (r.headers.count("transfer-encoding")) {
      std::optional<std::string> chunk;
      while ((chunk = read_chunk()) && !chunk->empty()) r.body += *chunk;
      if (!chunk) r.status = 0;
    } else if (r.headers.count("content-length")) {
      const auto body = read_bytes(std::stoul(r.headers["content-length"]));
      body ? r.body = *body : (r.status = 0, std::string());
    }
    return r;
  }

 private:
  bool fill() {
    char bytes[4096];
    const ssize_t n = recv(fd_, bytes, sizeof bytes, 0);
    if (n > 0) buffer_.append(bytes, static_cast<size_t>(n));
    return n > 0;
  }
  std::string take(size_t count) {
    std::string taken = buffer_.substr(0, count);
    buffer_.erase(0, count);
    return taken;
  }

  int fd_;
  bool connected_ = false;
  std::string buffer_;
};

}  // namespace plumb::testing
