#include "serving/admission.h"

namespace mlcpipe::serving {
namespace {

constexpr int kProtected = 3;  // preemptions, after which a sequence is preempted only if all have had as many
constexpr double kAgingS = 5;  // of waiting are worth a class

bool Before(const SequencePointer& a, const SequencePointer& b) { return a->order() < b->order(); }

// Whether two sequences have the same tokens in a range of pages.
bool SamePages(const Sequence& a, const Sequence& b, int64_t begin, int64_t end) {
  return std::equal(a.tokens.begin() + begin * kPage, a.tokens.begin() + end * kPage, b.tokens.begin() + begin * kPage);
}

}  // namespace

int64_t LevelOf(const Sequence& sequence, double now) {
  return sequence.request.priority + static_cast<int64_t>((now - sequence.request.arrival) / kAgingS);
}

int64_t Admission::places() const {
  return limits_.sequences - static_cast<int64_t>(running.size() + prefilling.size()) - forking;
}

Ordered& Admission::ListOf(const Sequence& sequence, State state) {
  if (state == State::kWaiting) return waiting[sequence.request.priority - kMinPriority];
  return state == State::kRunning ? running : prefilling;
}

void Admission::Move(const SequencePointer& sequence, State state) {
  if (sequence->state == state && state != State::kWaiting) return;
  if (sequence->state != State::kEnded) {
    Ordered& from = ListOf(*sequence, sequence->state);
    const auto at = std::lower_bound(from.begin(), from.end(), sequence, Before);
    if (at != from.end() && *at == sequence) from.erase(at);
  }
  sequence->state = state;
  if (state == State::kEnded) return;
  Ordered& to = ListOf(*sequence, state);
  to.insert(std::lower_bound(to.begin(), to.end(), sequence, Before), sequence);
}

std::vector<SequencePointer> Admission::Active() const {
  std::vector<SequencePointer> active = running;
  active.insert(active.end(), prefilling.begin(), prefilling.end());
  return active;
}

bool Admission::PreemptFor(const Sequence& sequence) {
  const auto active = Active();
  if (active.size() == 1 && active[0].get() == &sequence && tree_->has_pins()) {
    tree_->Unpin();
    return true;
  }
  const auto often = [](const SequencePointer& one) { return one->preemptions >= kProtected; };
  const bool all = std::all_of(active.begin(), active.end(), often);
  SequencePointer victim;
  for (const SequencePointer& one : active) {
    if ((all || !often(one)) && (!victim || Before(victim, one))) victim = one;
  }
  Preempt(victim);
  return victim.get() != &sequence;
}

bool Admission::PreemptBelow(int priority) {
  SequencePointer victim;
  for (const SequencePointer& one : Active()) {
    const bool may = one->request.priority < priority && one->preemptions < kProtected;
    if (may && (!victim || Before(victim, one))) victim = one;
  }
  if (victim) Preempt(victim);
  return victim != nullptr;
}

// Its full pages are in the tree, so that coming back costs what is evicted meanwhile.
void Admission::Preempt(const SequencePointer& sequence) {
  on_preemption(*sequence);
  pool_->Release(sequence.get());
  ++sequence->preemptions;
  Move(sequence, State::kWaiting);
}

void Admission::Finish(const SequencePointer& sequence) {
  if (sequence->request.keep && sequence->shared) tree_->Pin(*sequence);
  pool_->Release(sequence.get());
  sequence->leader = nullptr;
  Move(sequence, State::kEnded);
}

void Admission::CountCached(Sequence* sequence) const {
  if (sequence->cached) return;
  sequence->cached = sequence->computed;
  sequence->miss = tree_->MissOf(*sequence);
}

// Whether another sequence is about to compute pages that this waiting one needs and does not find.
bool Admission::AwaitsLeader(Sequence* sequence) const {
  const SequencePointer& first = sequence->leader;
  if (first && first->state == State::kPrefilling && first->computed < sequence->leader_tokens) return true;
  sequence->leader = nullptr;
  return false;
}

bool Admission::Admit(const SequencePointer& sequence) {
  if (AwaitsLeader(sequence.get()) || (blocked_id_ == sequence->id && blocked_frees_ == pool_->frees)) return false;
  tree_->Take(sequence.get());
  FindLeader(sequence.get());
  if (!sequence->leader && MakeRoom(*sequence)) {
    CountCached(sequence.get());
    Move(sequence, State::kPrefilling);
    return true;
  }
  pool_->Release(sequence.get());
  if (!sequence->leader) {
    blocked_id_ = sequence->id;
    blocked_frees_ = pool_->frees;
  }
  return false;
}

// A place and pages for it; false if no sequence that has them can be preempted.
bool Admission::MakeRoom(const Sequence& sequence) {
  while (places() <= 0 || !Fits(sequence)) {
    if (PreemptBelow(sequence.request.priority)) continue;
    if (!running.empty() || !prefilling.empty() || !tree_->has_pins()) return false;
    tree_->Unpin();
  }
  return true;
}

std::vector<SequencePointer> Admission::SamePrompt(const SequencePointer& first) {
  if (first->answer()) return {};
  int64_t room = places();
  const int64_t taken = static_cast<int64_t>(running.size() + prefilling.size()) + forking;
  for (const UnitPool& units : pool_->units) room = std::min(room, units.available() - taken);
  std::vector<SequencePointer> found;
  for (const Ordered& sequences : waiting) {
    for (const SequencePointer& one : sequences) {
      const bool exact = first->request.deterministic || !one->request.deterministic;
      const bool same = !one->answer() && one->tokens == first->tokens &&
                        tree_->FamilyOf(*one) == tree_->FamilyOf(*first);
      if (!same || !exact || static_cast<int64_t>(found.size()) >= room) continue;
      one->leader = first;
      one->leader_tokens = first->length();
      found.push_back(one);
    }
  }
  forking += static_cast<int64_t>(found.size());
  return found;
}

bool Admission::Fork(const Sequence& first, const SequencePointer& sequence) {
  if (sequence->state != State::kWaiting) return false;
  pool_->Fork(first, sequence.get());
  CountCached(sequence.get());
  Move(sequence, State::kPrefilling);
  return true;
}

// Sets `leader` if an admitted prompt has the next page of this one and has yet to compute it.
void Admission::FindLeader(Sequence* sequence) const {
  int64_t at = sequence->computed / kPage;
  const int64_t last = std::min(sequence->decode_from, sequence->length() - 1) / kPage;
  for (const SequencePointer& first : prefilling) {
    const int64_t end = std::min(last, first->decode_from / kPage);
    if (first->computed / kPage > at || end <= at || tree_->FamilyOf(*first) != tree_->FamilyOf(*sequence)) continue;
    if (!SamePages(*first, *sequence, 0, at + 1)) continue;
    while (at < end && SamePages(*first, *sequence, at, at + 1)) ++at;
    sequence->leader = first;
    sequence->leader_tokens = at * kPage;
    return;
  }
}

// Whether there are pages for all its tokens, and slots, beside what admitted prompts and answers will need.
bool Admission::Fits(const Sequence& sequence) const {
  for (size_t kind = 0; kind < pool_->units.size(); ++kind) {
    auto needed = UnitsNeeded(kind, sequence) + static_cast<int64_t>(running.size());
    for (const SequencePointer& other : prefilling) needed += UnitsNeeded(kind, *other);
    if (needed > pool_->units[kind].available()) return false;
  }
  return true;
}

// Units that a sequence needs beyond those it has, to draw its next token.
int64_t Admission::UnitsNeeded(size_t kind, const Sequence& sequence) const {
  if (kind == pool_->groups.size()) {  // one that a step reads, and one that it writes
    const bool same = sequence.slot == sequence.next_slot;
    return 2 - (sequence.slot != kNoUnit) - (sequence.next_slot != kNoUnit && !same);
  }
  const int64_t most = PagesAtOnce(pool_->groups[kind].window, sequence.length() + 1, limits_.prefill_chunk);
  const int64_t has = static_cast<int64_t>(sequence.tables[kind].size()) - sequence.kept_from[kind];
  return std::max<int64_t>(0, most - has);
}

}  // namespace mlcpipe::serving
