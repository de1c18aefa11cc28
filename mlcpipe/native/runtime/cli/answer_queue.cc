#include "cli/answer_queue.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "cli/arguments.h"
#include "cli/thread.h"

namespace mlcpipe::cli {
namespace {

constexpr int kRetryS = 5, kMaxRetryS = 60;
constexpr auto kCancelAgain = std::chrono::milliseconds(10);

using Clock = std::chrono::steady_clock;
using Lock = std::unique_lock<std::mutex>;

ApiError ServerEnds() { return {503, "the server ended the request", "cancelled", "", kRetryS}; }

}  // namespace

ApiError LastRefusal() {
  auto error = Sized<mlcpipe_error>();
  mlcpipe_last_error(&error);
  switch (error.code) {
    case MLCPIPE_RESOURCE:
      return {503, error.line, "out_of_memory", "", kRetryS};
    case MLCPIPE_COMPUTE:
      return {500, error.line, "compute_error", ""};
    case MLCPIPE_INTERNAL:
      return {500, error.line, "", ""};
    default:
      return {400, error.line, "", ""};
  }
}

Ticket::Ticket(AnswerQueue* queue, const Body& body, ReasoningSplitter::State state, int wake)
    : queue_(queue), body_(body), wake_(wake), splitter_(state) {
  queue->Add(this);
}

Ticket::~Ticket() { queue_->Remove(this); }

News Ticket::Take() {
  const Lock lock(queue_->mutex_);
  News news = news_;
  news_.delta = {};
  return news;
}

// Returns whether the answer is wanted.
bool Ticket::Push(const Delta& delta) {
  const Lock lock(queue_->mutex_);
  news_.begun = true;
  news_.delta.text += delta.text;
  news_.delta.reasoning += delta.reasoning;
  eventfd_write(wake_, 1);
  return !left_ && !queue_->ended_;
}

int32_t Ticket::OnToken(void* context, int32_t) {
  auto* ticket = static_cast<Ticket*>(context);
  ticket->reasoning_tokens_ += ticket->splitter_.inside();
  return !ticket->Push({});
}

int32_t Ticket::OnText(void* context, const char* text, size_t bytes) {
  auto* ticket = static_cast<Ticket*>(context);
  return !ticket->Push(ticket->splitter_.Push({text, bytes}));
}

void Ticket::Compute() {
  mlcpipe_sampling sampling = body_.sampling;
  sampling.bias_tokens = body_.bias_tokens.data();
  sampling.biases = body_.biases.data();
  sampling.bias_count = body_.biases.size();
  std::vector<mlcpipe_text> stops;
  for (const std::string& stop : body_.stops) stops.push_back({stop.data(), stop.size()});
  auto request = Sized<mlcpipe_request>();
  request.max_tokens = body_.max_tokens;
  request.sampling = &sampling;
  request.on_token = OnToken;
  request.on_text = OnText;
  request.context = this;
  request.text = {body_.text.data(), body_.text.size()};
  request.messages = {body_.messages.data(), body_.messages.size()};
  request.variables = {body_.variables.data(), body_.variables.size()};
  request.stops = stops.data();
  request.stops_count = stops.size();
  request.ignore_end = body_.ignore_end;
  auto statistics = Sized<mlcpipe_statistics>();
  if (body_.deterministic) mlcpipe_reset(queue_->engine_);
  const int32_t code = mlcpipe_generate(queue_->engine_, &request, &statistics);
  if (code == MLCPIPE_OK) Push(splitter_.Finish());
  const Lock lock(queue_->mutex_);
  news_.stopped = statistics.finish == MLCPIPE_STOP;
  news_.usage = {statistics.prompt_tokens, statistics.completion_tokens, statistics.cached_tokens, reasoning_tokens_};
  if (code == MLCPIPE_CANCELLED) news_.error = ServerEnds();
  else if (code != MLCPIPE_OK) news_.error = LastRefusal();
}

AnswerQueue::AnswerQueue(mlcpipe_engine engine, size_t max_waiting) : engine_(engine), max_waiting_(max_waiting) {
  if (!StartThread([this] { Run(); }, &thread_)) Fail("the system gives no more threads");
}

AnswerQueue::~AnswerQueue() {
  {
    const Lock lock(mutex_);
    quits_ = true;
    changed_.notify_all();
  }
  pthread_join(thread_, nullptr);
}

void AnswerQueue::Run() {
  Lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return quits_ || !waiting_.empty(); });
    if (waiting_.empty()) return;
    running_ = waiting_.front();
    waiting_.pop_front();
    lock.unlock();
    const auto began = Clock::now();
    running_->Compute();
    lock.lock();
    last_s_ = std::chrono::duration<double>(Clock::now() - began).count();
    running_->news_.done = true;
    eventfd_write(running_->wake_, 1);
    running_ = nullptr;
    changed_.notify_all();
  }
}

void AnswerQueue::Add(Ticket* ticket) {
  const Lock lock(mutex_);
  if (closed_) throw ApiError{503, "the server is shutting down", "overloaded", "", kRetryS};
  if (waiting_.size() + (running_ != nullptr) > max_waiting_) {
    const std::string count = std::to_string(waiting_.size());
    const double seconds = std::ceil(last_s_ * static_cast<double>(waiting_.size() + 1));
    const int retry_s = static_cast<int>(std::clamp(seconds, 1.0, double{kMaxRetryS}));
    throw ApiError{503, count + " requests are waiting already; try again in " + std::to_string(retry_s) + " s",
                   "overloaded", "", retry_s};
  }
  waiting_.push_back(ticket);
  changed_.notify_all();
}

// Waits until the engine's thread has nothing to do with the ticket. The engine forgets a cancel that comes before it
// has begun, so that it is said again.
void AnswerQueue::Remove(Ticket* ticket) {
  Lock lock(mutex_);
  ticket->left_ = true;
  waiting_.erase(std::remove(waiting_.begin(), waiting_.end(), ticket), waiting_.end());
  while (running_ == ticket) {
    mlcpipe_cancel(engine_);
    changed_.wait_for(lock, kCancelAgain);
  }
  changed_.notify_all();
}

void AnswerQueue::Close() {
  const Lock lock(mutex_);
  closed_ = true;
}

void AnswerQueue::End() {
  Lock lock(mutex_);
  closed_ = ended_ = true;
  for (Ticket* ticket : waiting_) {
    ticket->news_.error = ServerEnds();
    ticket->news_.done = true;
    eventfd_write(ticket->wake_, 1);
  }
  waiting_.clear();
  while (running_) {
    mlcpipe_cancel(engine_);
    changed_.wait_for(lock, kCancelAgain);
  }
}

bool AnswerQueue::WaitIdle(double seconds) {
  Lock lock(mutex_);
  return changed_.wait_for(lock, std::chrono::duration<double>(seconds),
                           [this] { return !running_ && waiting_.empty(); });
}

}  // namespace mlcpipe::cli
