#include "serve/engine_thread.h"

#include "base/error.h"
#include "base/log.h"
#include "serve/errors.h"

namespace plumb::serve {
namespace {

double seconds_between(std::chrono::steady_clock::time_point a, std::chrono::steady_clock::time_point b) {
  return std::chrono::duration<double>(b - a).count();
}

size_t bytes_of(const Event& e) {
  size_t bytes = sizeof(Event) + e.text.size() + e.token.top.size() * sizeof(TokenLogprob);
  bytes += e.prompt_logprobs.size() * sizeof(float);
  if (e.routed.defined()) bytes += static_cast<size_t>(e.routed.numel()) * sizeof(int32_t);
  return bytes;
}

}  // namespace

Mailbox::Content Mailbox::take() {
  const std::lock_guard lock(mutex_);
  Content taken = std::move(content_);
  content_ = Content{taken.accepted, {}, {}};
  bytes_ = 0;
  return taken;
}

void Mailbox::close() {
  const std::lock_guard lock(mutex_);
  wake_ = [] {};
}

void Mailbox::accept() {
  const std::lock_guard lock(mutex_);
  content_.accepted = true;
  wake_();
}

bool Mailbox::put(Item item) {
  const std::lock_guard lock(mutex_);
  if (bytes_ > limit_) return false;
  const bool first = content_.items.empty();  // otherwise the reader has been woken already
  bytes_ += bytes_of(item.event);
  content_.items.push_back(std::move(item));
  if (first) wake_();
  return true;
}

void Mailbox::fail(ApiError error) {
  const std::lock_guard lock(mutex_);
  content_.error = std::move(error);
  wake_();
}

EngineThread::EngineThread(std::unique_ptr<Engine> engine, const EngineThreadOptions& options, Metrics& metrics)
    : engine_(std::move(engine)), options_(options), metrics_(metrics), stats_(engine_->stats()) {
  thread_ = std::thread([this] { run(); });
}

EngineThread::~EngineThread() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

EngineThread::JobId EngineThread::submit(std::vector<Request> requests, std::shared_ptr<Mailbox> mailbox) {
  const int count = static_cast<int>(requests.size());
  PLUMB_CHECK(count > 0, "an exchange asks for no answer");
  JobId job;
  {
    const std::lock_guard lock(mutex_);
    if (count > options_.max_open)
      throw ApiError{400, "n",
                     "n: " + std::to_string(count) +
                         " answers are more than this server takes at a time (ask for at most " +
                         std::to_string(options_.max_open) + ")"};
    if (open_ + count > options_.max_open)
      throw ApiError{429, "", "the queue is full (" + std::to_string(open_) + " answers run or wait); try again later",
                     1};
    open_ += count;
    job = next_job_++;
    commands_.push_back({job, std::move(requests), std::move(mailbox), Clock::now()});
  }
  changed_.notify_one();
  return job;
}

void EngineThread::cancel(JobId job) {
  {
    const std::lock_guard lock(mutex_);
    commands_.push_back({job, {}, nullptr, {}});
  }
  changed_.notify_one();
}

EngineStats EngineThread::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

void EngineThread::run() {
  while (take_commands()) {
    end_late();
    step();
  }
  while (!jobs_.empty()) end_job(jobs_.begin(), "abort", ApiError{503, "", "the server is stopping"});
}

bool EngineThread::take_commands() {
  std::vector<Command> commands;
  {
    std::unique_lock lock(mutex_);
    stats_ = engine_->stats();
    changed_.wait(lock, [&] { return stop_ || !commands_.empty() || !engine_->idle(); });
    commands.swap(commands_);
  }
  for (Command& c : commands) {
    if (c.mailbox)
      start(c);
    else if (const auto job = jobs_.find(c.job); job != jobs_.end())
      end_job(job, "abort", {});
  }
  publish_stats();
  const std::lock_guard lock(mutex_);
  return !stop_;
}

void EngineThread::publish_stats() {
  const std::lock_guard lock(mutex_);
  stats_ = engine_->stats();
}

void EngineThread::start(Command& c) {
  const auto job = jobs_.emplace(c.job, Job{c.mailbox, {}, 0, c.asked}).first;
  try {
    job->second.open = static_cast<int>(c.requests.size());
    job->second.choices.resize(c.requests.size());
    for (size_t i = 0; i < c.requests.size(); ++i) {
      Choice& choice = job->second.choices[i];
      choice.prompt = static_cast<int64_t>(c.requests[i].prompt.size());
      choice.request = engine_->submit(std::move(c.requests[i]));
      places_[choice.request] = {c.job, static_cast<int>(i)};
    }
    c.mailbox->accept();
  } catch (...) {
    end_job(job, "error", error_of(std::current_exception()));
  }
}

void EngineThread::step() {
  try {
    std::vector<Event> events = engine_->step();
    publish_stats();
    for (Event& e : events) deliver(std::move(e));
  } catch (const std::exception& e) {
    // What a request can cause comes as an event; this is worse. All requests end, and the next one finds an empty
    // engine.
    log_warning("the engine failed, {} requests end: {}", jobs_.size(), e.what());
    while (!jobs_.empty())
      end_job(jobs_.begin(), "error", ApiError{500, "", std::string("the engine failed: ") + e.what()});
  }
}

void EngineThread::deliver(Event event) {
  const auto place = places_.find(event.request);
  if (place == places_.end()) return;
  const auto job = jobs_.find(place->second.job);
  if (event.finish == Finish::error)
    return end_job(job, "error", ApiError{500, "", "the engine failed: " + event.error});
  Choice& choice = job->second.choices[place->second.choice];
  if (!choice.begun) metrics_.prompt_read(choice.prompt);
  choice.begun = true;
  if (event.token.id >= 0) count_token(choice, job->second.asked);
  // Before the client can know of it: who has its answer finds it counted, and room in the queue.
  const int index = place->second.choice;
  if (event.finish != Finish::none) end_choice(job, choice, event.finish == Finish::stop ? "stop" : "length");
  if (!job->second.mailbox->put({index, std::move(event)}))
    end_job(job, "abort", ApiError{408, "", "the client reads its answer too slowly"});
  else if (job->second.open == 0)
    jobs_.erase(job);
}

void EngineThread::count_token(Choice& choice, Clock::time_point asked) {
  const auto now = Clock::now();
  if (choice.last_token)
    metrics_.next_token(seconds_between(*choice.last_token, now));
  else
    metrics_.first_token(seconds_between(asked, now));
  choice.last_token = now;
}

void EngineThread::end_choice(Jobs::iterator job, Choice& choice, const char* reason) {
  metrics_.finished(reason, seconds_between(job->second.asked, Clock::now()));
  places_.erase(choice.request);
  choice.request = 0;
  --job->second.open;
  const std::lock_guard lock(mutex_);
  --open_;
}

// Ends the choices that have not ended.
void EngineThread::end_job(Jobs::iterator job, const char* reason, const std::optional<ApiError>& error) {
  for (Choice& choice : job->second.choices)
    if (choice.request != 0) {
      engine_->cancel(choice.request);
      end_choice(job, choice, reason);
    }
  {
    const std::lock_guard lock(mutex_);
    open_ -= job->second.open;  // those that the engine has never taken
  }
  if (error) job->second.mailbox->fail(*error);
  jobs_.erase(job);
}

void EngineThread::end_late() {
  if (options_.timeout.count() == 0) return;
  const auto earliest = Clock::now() - options_.timeout;
  while (!jobs_.empty() && jobs_.begin()->second.asked < earliest)
    end_job(jobs_.begin(), "abort",
            ApiError{504, "",
                     "the answer was not complete after " + std::to_string(options_.timeout.count()) +
                         " ms; ask for fewer tokens or start the server with a larger --timeout"});
}

}  // namespace plumb::serve
