// Several answers at the same time over one pool of pages (mlcpipe/runtime/serving/batching.py).
#ifndef MLCPIPE_RUNTIME_SERVING_BATCH_H_
#define MLCPIPE_RUNTIME_SERVING_BATCH_H_

#include <tvm/ffi/container/array.h>

#include <chrono>
#include <mutex>

#include "answer_types.h"
#include "library.h"
#include "plan.h"
#include "pool.h"
#include "sampler.h"
#include "serving/draft_head.h"
#include "serving/scheduler.h"
#include "step.h"
#include "token_tables.h"

namespace mlcpipe::serving {

// A request: a prompt, how tokens are sampled, and its listeners. Both functions are called by `Batch::Step`.
struct Client {
  Request request;  // its tokens are of the vocabulary
  Sampling sampling;
  std::optional<double> timeout_s;  // from `Batch::Submit` to the end
  std::function<Verdict(int32_t)> on_token;  // as of `Engine::Generate`
  // Once, at the end; `error` is null where the answer is whole.
  std::function<void(const Statistics&, std::optional<Finish>, const Error* error)> on_end;
};

class Batch {
 public:
  // Takes the memory that was planned; the plan must stay. A forward ends soon after `*cancelled` is not 0.
  Batch(const Manifest& manifest, const Device& device, const Library& library,
        TokenTables weights, const Plan& plan, const Options& options, const int* cancelled);

  // From any thread: the client waits for `Step`. Returns its number.
  uint64_t Submit(Client client);
  // From any thread: the answer ends at the next step with kCancelled.
  void Cancel(uint64_t number);
  // Computes what is next of all answers. Returns how many have not ended. Where the system gives no more memory, those that
  // it concerns end with kResource.
  size_t Step();

 private:
  using Clock = std::chrono::steady_clock;
  struct Answer {
    Client client;
    Statistics statistics;
    SequencePointer sequence;
    std::optional<Row> row;
    Clock::time_point came, first;
  };
  // A row with logits; without a sequence its token is not needed. The others are in the order of `Scheduler::Settle`. It
  // follows the first `drafted` tokens of the sequence's draft.
  struct Drawing {
    SequencePointer sequence;
    int64_t position;
    size_t drafted = 0;
  };

  const Manifest& manifest_;
  const Device& device_;
  tvm::ffi::Function decode_, prefill_;
  TokenTables weights_;
  tvm::ffi::Array<tvm::runtime::Tensor> states_;
  const bool drafts_;
  const int* cancelled_;
  const Plan& plan_;
  const int64_t sequences_;
  const Error no_memory_{Code::kResource, "the system gives no more memory"};  // made while there is some
  mlcpipe_step_threads step_threads_[MLCPIPE_ROW_CLASSES] = {};
  std::optional<DraftHead> head_;
  std::optional<Scheduler> scheduler_;
  StepBuffer buffer_;
  Sampler sampler_;
  tvm::runtime::Tensor decode_logits_, prefill_logits_;
  // Of a forward, kept for their memory.
  std::vector<int32_t> ids_, wanted_, drawn_;
  bool taking_ = false;  // the step's results: where that fails, answers are half changed
  std::vector<Span> spans_;
  std::vector<Drawing> rows_;
  std::vector<RowDraw> draws_;
  Numbers ids_data_, wanted_data_;
  const Clock::time_point began_ = Clock::now();
  std::map<int64_t, std::pair<uint64_t, Answer>> answers_;  // by sequence
  std::mutex mutex_;                                        // of the rest
  uint64_t next_ = 1;
  std::map<uint64_t, Client> come_;
  std::vector<uint64_t> gone_;

  double Now() const { return std::chrono::duration<double>(Clock::now() - began_).count(); }
  void MakeScheduler();
  void StartOver(const Error& error);
  void TakeNews();
  void Begin(uint64_t number, Client client);
  void Advance(const serving::Step& step);
  // Leaves the tokens in `drawn_`.
  void Compute(const serving::Step& step);
  void Decode(const serving::Step& step);
  void Prefill(const serving::Step& step);
  void Draw(const tvm::runtime::Tensor& logits);
  // How the tokens of a sequence are drawn; null for one that has ended.
  Row* RowOfAnswer(const Sequence& sequence);
  int32_t Take(const Drawing& row, int32_t token);
  void Deliver(const std::vector<Event>& events);
  void Fail(const serving::Step& step, const Error& error);
  // Tells a client of its end, of another one where there is no memory for the last text.
  void Tell(const Client& client, const Statistics& statistics, std::optional<Finish> finish, const Error* error) const;
  // Ends an answer and tells its client.
  void EndAnswer(int64_t id, std::optional<Finish> finish, const Error* error);
};

}  // namespace mlcpipe::serving

#endif  // MLCPIPE_RUNTIME_SERVING_BATCH_H_
