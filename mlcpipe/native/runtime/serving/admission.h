// Admission and preemption: which sequences hold pages, which wait, which are preempted
// (mlcpipe/runtime/serving/admission.py).
#ifndef MLCPIPE_RUNTIME_SERVING_ADMISSION_H_
#define MLCPIPE_RUNTIME_SERVING_ADMISSION_H_

#include <functional>

#include "serving/prefix_tree.h"

namespace mlcpipe::serving {

// Limits of a scheduler.
struct Limits {
  int64_t context = 0;          // tokens of a prompt and its answer
  int64_t prefill_chunk = 512;  // rows of a prefill forward,
  int64_t decode_rows = 512;    // and of a decode forward
  int64_t sequences = 64;       // admitted at once
  int64_t queue = 256;          // requests that wait
  double step_s = 0.1;          // how long a step may take while answers wait for their next token
  // Longer sequences have other frequencies of RoPE, so all tokens are recomputed when an answer gets there.
  std::optional<int64_t> recompute_above;
};

// The class of a sequence that is not served, raised by its age.
int64_t LevelOf(const Sequence& sequence, double now);

// Sequences in the order of `Sequence::order`.
using Ordered = std::vector<SequencePointer>;

// Each sequence that has not ended is in one list by its state; only admitted ones have pages.
class Admission {
 public:
  Admission(PagePool* pool, PrefixTree* tree, const Limits& limits) : pool_(pool), tree_(tree), limits_(limits) {}

  // How many more sequences may be admitted.
  int64_t places() const;
  size_t waiting_count() const { return waiting[0].size() + waiting[1].size() + waiting[2].size(); }
  // To the list of this state.
  void Move(const SequencePointer& sequence, State state);
  // Preempts the newest sequence of the lowest class that has not been preempted too often; false if that is the sequence
  // itself.
  bool PreemptFor(const Sequence& sequence);
  // The sequence has no pages and is in no list.
  void Finish(const SequencePointer& sequence);
  // Admits a waiting sequence with the pages that are found; false if it has to wait: for one that computes a prefix of its
  // prompt, or because its prompt would take pages that admitted ones were promised. Lower classes are preempted.
  bool Admit(const SequencePointer& sequence);
  // The waiting sequences with the same prompt, which will start where this one's ends, up to the places and pages.
  std::vector<SequencePointer> SamePrompt(const SequencePointer& first);
  // The sequence starts with the pages of `first`, whose prompt it has; false if it does not wait any more.
  bool Fork(const Sequence& first, const SequencePointer& sequence);

  Ordered waiting[3];  // by class, the lowest first
  Ordered prefilling, running;
  int64_t forking = 0;  // places that the step being planned gives to those of `SamePrompt`
  std::function<void(const Sequence&)> on_preemption;

 private:
  PagePool* pool_;
  PrefixTree* tree_;
  const Limits& limits_;
  int64_t blocked_id_ = -1, blocked_frees_ = 0;  // the sequence that did not fit, and the pool's `frees` then

  Ordered& ListOf(const Sequence& sequence, State state);
  std::vector<SequencePointer> Active() const;
  void Preempt(const SequencePointer& sequence);
  bool PreemptBelow(int priority);
  void CountCached(Sequence* sequence) const;
  bool AwaitsLeader(Sequence* sequence) const;
  void FindLeader(Sequence* sequence) const;
  bool MakeRoom(const Sequence& sequence);
  bool Fits(const Sequence& sequence) const;
  int64_t UnitsNeeded(size_t kind, const Sequence& sequence) const;
};

}  // namespace mlcpipe::serving

#endif  // MLCPIPE_RUNTIME_SERVING_ADMISSION_H_
