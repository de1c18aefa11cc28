#include "cli/answer_queue.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cmath>

#include "cli/arguments.h"
#include "cli/thread.h"

namespace mlcpipe::cli {
namespace {

constexpr int kRetryS = 5, kMaxRetryS = 60;
constexpr std::chrono::milliseconds kTokenizing(1);

using Clock = std::chrono::steady_clock;
using Lock = std::unique_lock<std::mutex>;

// The field of a request that a line of an error begins with, or "".
std::string FieldOf(std::string_view line) {
  const std::string_view what = line.substr(0, line.find(';'));
  const auto of_name = [](unsigned char c) { return std::isalnum(c) || c == '_' || c == '[' || c == ']' || c == '.'; };
  return std::all_of(what.begin(), what.end(), of_name) ? std::string(what) : "";
}

// Made of words so short that they take no memory.
ApiError NoMemory() { return {503, "out of memory", "out_of_memory", "", kRetryS}; }

// The last refusal, where there is memory for its words.
ApiError ToldRefusal() {
  try {
    return LastRefusal();
  } catch (const std::bad_alloc&) {
    return NoMemory();
  }
}

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
      return {400, error.line, "", FieldOf(error.line)};
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
  return !queue_->ended_;
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

void Ticket::Submit() {
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
  request.deterministic = body_.deterministic;
  request.priority = body_.priority;
  request.timeout_s = body_.timeout_s;
  mlcpipe_answer answer = 0;
  if (mlcpipe_submit(queue_->engine_, &request, OnEnd, &answer) != MLCPIPE_OK) throw LastRefusal();
  const Lock lock(queue_->mutex_);
  answer_ = answer;
  if (queue_->ended_) mlcpipe_cancel_answer(queue_->engine_, answer);
}

void Ticket::OnEnd(void* context, int32_t code, const mlcpipe_statistics* statistics) {
  auto* ticket = static_cast<Ticket*>(context);
  if (code == MLCPIPE_OK) ticket->Push(ticket->splitter_.Finish());
  AnswerQueue* queue = ticket->queue_;
  const Lock lock(queue->mutex_);
  News& news = ticket->news_;
  news.stopped = statistics->finish == MLCPIPE_STOP;
  news.usage = {statistics->prompt_tokens, statistics->completion_tokens, statistics->cached_tokens,
                ticket->reasoning_tokens_, statistics->cache_miss, statistics->cache_miss_token};
  if (code == MLCPIPE_CANCELLED) news.error = ServerEnds();
  else if (code != MLCPIPE_OK) news.error = ToldRefusal();
  news.done = true;
  eventfd_write(ticket->wake_, 1);
  queue->last_s_ = std::chrono::duration<double>(Clock::now() - ticket->began_).count();
  queue->tickets_.erase(ticket);
  queue->changed_.notify_all();
}

AnswerQueue::AnswerQueue(mlcpipe_engine engine, size_t sequences, size_t max_waiting)
    : engine_(engine), sequences_(sequences), max_waiting_(max_waiting) {
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
    changed_.wait(lock, [this] { return quits_ || !tickets_.empty(); });
    if (tickets_.empty()) return;
    lock.unlock();
    size_t left = 0;
    const int32_t code = mlcpipe_step(engine_, &left);
    lock.lock();
    if (code != MLCPIPE_OK) EndAll(ToldRefusal());
    else if (!left && !tickets_.empty()) changed_.wait_for(lock, kTokenizing);  // their prompts become tokens
  }
}

// The engine is closed: other steps that fail end their answers themselves.
void AnswerQueue::EndAll(const ApiError& error) {
  closed_ = true;
  for (Ticket* ticket : tickets_) {
    ticket->news_.error = error;
    ticket->news_.done = true;
    eventfd_write(ticket->wake_, 1);
  }
  tickets_.clear();
  changed_.notify_all();
}

void AnswerQueue::Add(Ticket* ticket) {
  Lock lock(mutex_);
  if (closed_) throw ApiError{503, "the server is shutting down", "overloaded", "", kRetryS};
  if (tickets_.size() >= sequences_ + max_waiting_) {
    const size_t waiting = tickets_.size() - sequences_;
    const double seconds = std::ceil(last_s_ * static_cast<double>(waiting + 1) / static_cast<double>(sequences_));
    const int retry_s = static_cast<int>(std::clamp(seconds, 1.0, double{kMaxRetryS}));
    throw ApiError{503, std::to_string(waiting) + " requests are waiting already; try again in " +
                            std::to_string(retry_s) + " s", "overloaded", "", retry_s};
  }
  tickets_.insert(ticket);
  lock.unlock();
  try {
    ticket->Submit();
  } catch (...) {
    lock.lock();
    tickets_.erase(ticket);
    changed_.notify_all();
    throw;
  }
  lock.lock();
  changed_.notify_all();
}

// Waits until the engine's thread has nothing to do with the ticket.
void AnswerQueue::Remove(Ticket* ticket) {
  Lock lock(mutex_);
  if (tickets_.count(ticket)) mlcpipe_cancel_answer(engine_, ticket->answer_);
  changed_.wait(lock, [&] { return !tickets_.count(ticket); });
}

void AnswerQueue::Close() {
  const Lock lock(mutex_);
  closed_ = true;
}

void AnswerQueue::End() {
  Lock lock(mutex_);
  closed_ = ended_ = true;
  for (const Ticket* ticket : tickets_) mlcpipe_cancel_answer(engine_, ticket->answer_);
  changed_.wait(lock, [this] { return tickets_.empty(); });
}

bool AnswerQueue::WaitIdle(double seconds) {
  Lock lock(mutex_);
  return changed_.wait_for(lock, std::chrono::duration<double>(seconds),
                           [this] { return tickets_.empty(); });
}

}  // namespace mlcpipe::cli
