#include "serve/exchange_answer.h"

namespace plumb::serve {

ExchangeAnswer::ExchangeAnswer(std::unique_ptr<Exchange> exchange, ErrorForm form, EngineThread& engine, Wake wake)
    : exchange_(std::move(exchange)), form_(form), engine_(engine), mailbox_(engine.mailbox(std::move(wake))) {
  std::vector<Request> requests = exchange_->requests();
  open_ = requests.size();
  job_ = engine_.submit(std::move(requests), mailbox_);
}

ExchangeAnswer::~ExchangeAnswer() {
  mailbox_->close();
  if (open_ > 0) engine_.cancel(job_);
}

std::string ExchangeAnswer::feed(std::vector<Mailbox::Item> items) {
  std::string out;
  for (const Mailbox::Item& item : items) {
    out += exchange_->token(item.choice, item.event);
    if (item.event.finish != Finish::none) --open_;
  }
  return out;
}

std::optional<HttpReply> ExchangeAnswer::reply() {
  Mailbox::Content content = mailbox_->take();
  if (content.error) return error_reply(form_, *content.error);
  if (!content.accepted) return {};
  HttpReply r;
  try {
    if (!exchange_->streams()) {
      feed(std::move(content.items));
      if (open_ > 0) return {};
      r.body = dump(exchange_->whole());
      return r;
    }
    r.body = exchange_->begin();  // before the first token: C++ does not order the operands of a sum
    r.body += feed(std::move(content.items));
  } catch (...) {
    return error_reply(form_, error_of(std::current_exception()));
  }
  r.type = "text/event-stream";
  r.headers = {{"Cache-Control", "no-cache"}, {"X-Accel-Buffering", "no"}};  // proxies pass each event on at once
  r.open = true;
  return r;
}

bool ExchangeAnswer::more(std::string& out) {
  Mailbox::Content content = mailbox_->take();
  try {
    out += feed(std::move(content.items));
    if (content.error)
      out += error_event(form_, *content.error);
    else if (open_ == 0)
      out += exchange_->end();
  } catch (...) {
    out += error_event(form_, error_of(std::current_exception()));
    return true;
  }
  return content.error || open_ == 0;
}

}  // namespace plumb::serve
