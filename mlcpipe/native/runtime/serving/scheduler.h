// Who computes what in the next step (mlcpipe/runtime/serving/scheduler.py). No device, and no clock of its own.
#ifndef MLCPIPE_RUNTIME_SERVING_SCHEDULER_H_
#define MLCPIPE_RUNTIME_SERVING_SCHEDULER_H_

#include "serving/cost_model.h"
#include "serving/admission.h"

namespace mlcpipe::serving {

// First `copies`, then the forward of `few`, then that of `many`; then a token is drawn for each row with logits.
struct Step {
  double planned = 0;  // when
  std::vector<FewRows> few;
  std::vector<ManyRows> many;
  std::vector<PageCopy> copies;

  Load load() const;
};

// Call `Expire`, `Plan`, compute the step, `Settle`, again and again. Who has begun to answer goes on: one row each in every
// step. Prompts fill up what time is left. A prompt gets its pages when it is admitted; where answers grow beyond what there
// is, the youngest of the lowest class gives way. Times are seconds on the caller's clock, that of `Request::arrival`.
class Scheduler {
 public:
  Scheduler(std::vector<PageGroup> groups, int64_t slots, const Limits& limits, std::optional<int64_t> rope_above,
            const CostModel& cost);

  // Whether `Plan` has somebody to plan for.
  bool has_work() const { return admission_.waiting_count() || !admission_.prefilling.empty() || !admission_.running.empty(); }
  // The request waits. Throws kUsage where it could never be served, kResource where too many wait.
  SequencePointer Submit(Request request);
  // Ends a sequence and gives its pages back; what is under way for it is thrown away. After kError, which says that its
  // numbers are wrong, nobody finds its pages either. Returns false if it has ended.
  bool Cancel(const SequencePointer& sequence, End end);
  // Ends those whose deadline has come.
  std::vector<Event> Expire(double now);
  // The next step, valid until the next call; null where nobody can go on.
  const Step* Plan(double now);
  // `drawn` has a token for each row with logits: few, then many. Returns what each sequence got, valid until the next call.
  const std::vector<Event>& Settle(const Step& step, const std::vector<int32_t>& drawn, double now);

  const PagePool& pool() const { return pool_; }
  const Limits limits;

 private:
  PagePool pool_;
  PrefixTree tree_;
  CostModel cost_;
  Admission admission_;
  int64_t next_id_ = 0;
  std::map<std::pair<double, int64_t>, SequencePointer> deadlines_;
  // The long prompt that the last step had for first, and what that step computed of it and of all prompts.
  SequencePointer head_;
  int64_t head_rows_ = 0, many_rows_ = 0;
  double planned_ = 0;
  Step step_;  // the one being planned
  // Kept for their memory: a step of answers alone allocates none.
  Ordered answering_;
  std::vector<Event> events_;

  void AgeHead(double now);
  void PlanAnswers();
  void PlanPrompts(double now);
  Ordered Sorted(double now) const;
  Ordered ShorterFirst(Ordered ordered, int64_t rows, double now);
  int64_t PlanMany(const SequencePointer& sequence, int64_t rows);
  int64_t PlanFew(const SequencePointer& sequence, int64_t rows);
  int64_t ReserveSome(Sequence* sequence, int64_t rows);
  void Unplan(const Sequence& sequence);
  void Got(const SequencePointer& sequence, std::optional<int32_t> token);
  void Finish(const SequencePointer& sequence);
  bool Crossed(const Sequence& sequence) const;
};

}  // namespace mlcpipe::serving

#endif  // MLCPIPE_RUNTIME_SERVING_SCHEDULER_H_
