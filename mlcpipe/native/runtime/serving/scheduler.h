// Plans the rows of the next step (mlcpipe/runtime/serving/scheduler.py). No device, and no clock of its own.
#ifndef MLCPIPE_RUNTIME_SERVING_SCHEDULER_H_
#define MLCPIPE_RUNTIME_SERVING_SCHEDULER_H_

#include "serving/cost_model.h"
#include "serving/admission.h"

namespace mlcpipe::serving {

// First `copies`, then the forward of `decode`, then that of `prefill`; then a token is sampled for each row with logits.
struct Step {
  double planned = 0;  // when
  std::vector<DecodeRows> decode;
  std::vector<PrefillRows> prefill;
  std::vector<PageCopy> copies;

  Load load() const;
};

// Call `Expire`, `Plan`, compute the step, `Settle`, again and again. Each running answer has a row in every step; prompts
// fill the time that is left. A prompt gets its pages when it is admitted; when answers need more pages than there are, the
// newest sequence of the lowest class is preempted. Times are seconds on the caller's clock, that of `Request::arrival`; only
// the search for drafts is measured with one of its own.
class Scheduler {
 public:
  Scheduler(std::vector<PageGroup> groups, int64_t slots, const Limits& limits, std::optional<int64_t> rope_above,
            const CostModel& cost);

  // Whether `Plan` has a sequence to plan for.
  bool has_work() const { return admission_.waiting_count() || !admission_.prefilling.empty() || !admission_.running.empty(); }
  // The request waits. Throws kUsage where it could never be served, kResource where too many wait.
  SequencePointer Submit(Request request);
  // Ends a sequence and gives its pages back; the running step's result for it is dropped. After kError, which says that its
  // numbers are wrong, its pages are not found in the prefix tree either. Returns false if it has ended.
  bool Cancel(const SequencePointer& sequence, End end);
  // Ends those whose deadline has come.
  std::vector<Event> Expire(double now);
  // The next step, valid until the next call; null if no sequence can continue.
  const Step* Plan(double now);
  // `drawn` has a token for each row with logits: decode, then prefill. Returns the results, until the next call.
  const std::vector<Event>& Settle(const Step& step, const std::vector<int32_t>& drawn, double now);

  const PagePool& pool() const { return pool_; }
  const Ordered& running() const { return admission_.running; }
  CostModel& cost() { return cost_; }
  bool searches() const { return searches_; }  // for drafts, in the next step
  const Limits limits;

 private:
  PagePool pool_;
  PrefixTree tree_;
  CostModel cost_;
  Admission admission_;
  int64_t next_id_ = 0;
  std::map<std::pair<double, int64_t>, SequencePointer> deadlines_;
  // The long prompt that was first in the last step, and the rows that this step computed of it and of all prompts.
  SequencePointer head_;
  int64_t head_rows_ = 0, prefill_rows_ = 0;
  double planned_ = 0;
  Step step_;  // the one being planned
  Search search_;
  bool searches_ = true;  // for drafts, in the next step
  double searched_s_ = 0;
  std::vector<Draft> drafts_;  // of the running sequences, kept for its memory as what follows
  std::vector<double> gains_, next_gains_;
  std::vector<size_t> owners_, counts_;
  // Kept for their memory: a step of answers alone allocates little.
  Ordered answering_;
  std::vector<Event> events_;

  void AgeHead(double now);
  bool DraftAnswers();
  void KeepDrafts(const Load& load, int64_t room);
  int64_t SlotsForDrafts() const;
  void PlanAnswers();
  void PlanPrompts(double now);
  Ordered Sorted(double now) const;
  Ordered ShorterFirst(Ordered ordered, int64_t rows, double now);
  int64_t PlanPrefill(const SequencePointer& sequence, int64_t rows);
  int64_t PlanDecode(const SequencePointer& sequence, int64_t rows);
  int64_t ReserveSome(Sequence* sequence, int64_t rows);
  void Unplan(const Sequence& sequence);
  // The tokens that were drawn of a sequence's rows, the ones that stand first, as far as they stand.
  void GotAnswer(const DecodeRows& rows, const int32_t* drawn);
  void LearnOfSearch(const Load& load, const Step& step, double elapsed);
  void Got(const SequencePointer& sequence, const FewTokens& tokens);
  void Finish(const SequencePointer& sequence);
  bool Crossed(const Sequence& sequence) const;
};

}  // namespace mlcpipe::serving

#endif  // MLCPIPE_RUNTIME_SERVING_SCHEDULER_H_
