// Drives an Exchange: gives its requests to the engine, feeds it the tokens, and hands what it writes to the
// connection.
#pragma once
#include <memory>
#include <optional>
#include <string>

#include "serve/engine_thread.h"
#include "serve/errors.h"
#include "serve/exchange.h"
#include "serve/http.h"

namespace plumb::serve {

class ExchangeAnswer : public Answer {
 public:
  // Errors: what the exchange throws, ApiError 429.
  ExchangeAnswer(std::unique_ptr<Exchange> exchange, ErrorForm form, EngineThread& engine, Wake wake);
  ~ExchangeAnswer() override;

  std::optional<HttpReply> reply() override;
  bool more(std::string& out) override;
  void quiet(std::string& out) override { out += exchange_->keep_alive(); }

 private:
  std::string feed(std::vector<Mailbox::Item> items);

  std::unique_ptr<Exchange> exchange_;
  ErrorForm form_;
  EngineThread& engine_;
  std::shared_ptr<Mailbox> mailbox_;
  EngineThread::JobId job_ = 0;
  size_t open_ = 0;  // choices that have not ended
};

}  // namespace plumb::serve
