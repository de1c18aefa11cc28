// Answers at the same time: the engine's thread computes, the threads of connections submit and read.
#ifndef MLCPIPE_RUNTIME_CLI_ANSWER_QUEUE_H_
#define MLCPIPE_RUNTIME_CLI_ANSWER_QUEUE_H_

#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <set>

#include "cli/http.h"
#include "cli/openai.h"
#include "cli/reasoning.h"

namespace mlcpipe::cli {

// News of an answer; once `done`, `error` or the rest is set.
struct News {
  bool begun = false, done = false, stopped = false;
  Delta delta;
  UsageCounts usage;
  std::optional<ApiError> error;
};

class AnswerQueue;

// An answer from its construction to its end; where it ends early, the answer is cancelled. For one thread.
class Ticket {
 public:
  // `body` must stay; `wake` is an eventfd that is written to when there is news. Throws ApiError where too many wait.
  Ticket(AnswerQueue* queue, const Body& body, ReasoningSplitter::State state, int wake);
  ~Ticket();
  Ticket(const Ticket&) = delete;

  News Take();

 private:
  friend class AnswerQueue;

  AnswerQueue* queue_;
  const Body& body_;
  const int wake_;
  ReasoningSplitter splitter_;
  News news_;
  int64_t reasoning_tokens_ = 0;
  mlcpipe_answer answer_ = 0;
  std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();

  void Submit();
  bool Push(const Delta& delta);
  static int32_t OnToken(void* ticket, int32_t token);
  static int32_t OnText(void* ticket, const char* text, size_t bytes);
  static void OnEnd(void* ticket, int32_t code, const mlcpipe_statistics* statistics);
};

class AnswerQueue {
 public:
  AnswerQueue(mlcpipe_engine engine, size_t sequences, size_t max_waiting);
  // All tickets have ended.
  ~AnswerQueue();

  // New answers are refused from now on.
  void Close();
  // Those that are not finished end with an error.
  void End();
  // Whether all answers ended within this time.
  bool WaitIdle(double seconds);

 private:
  friend class Ticket;

  const mlcpipe_engine engine_;
  const size_t sequences_, max_waiting_;
  std::mutex mutex_;  // of the rest, and of all tickets
  std::condition_variable changed_;
  std::set<Ticket*> tickets_;  // whose answers have not ended
  double last_s_ = 1;  // that the last answer took
  bool closed_ = false, ended_ = false, quits_ = false;
  pthread_t thread_;

  void Add(Ticket* ticket);
  void Remove(Ticket* ticket);
  void Run();
  void EndAll(const ApiError& error);
};

// The refusal for the last error of this thread.
ApiError LastRefusal();

}  // namespace mlcpipe::cli

#endif  // MLCPIPE_RUNTIME_CLI_ANSWER_QUEUE_H_
