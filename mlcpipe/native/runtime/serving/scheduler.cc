#include "serving/scheduler.h"

#include <chrono>

#include "error.h"

namespace mlcpipe::serving {
namespace {

constexpr double kPatienceS = 2;   // that shorter prompts may go before a long one
constexpr size_t kLookAhead = 16;  // waiting requests beyond the free places that are looked at for shorter prompts

// Of rows that attend 1, 2, … keys after so many.
int64_t KeysOf(int64_t begin, int64_t rows) { return rows * begin + rows * (rows + 1) / 2; }

void Check(const Request& request) {
  if (request.tokens.empty()) throw Error(Code::kUsage, "the prompt").Expected("at least one token").Found("none");
  if (request.max_tokens < 1) {
    throw Error(Code::kUsage, "max_tokens").Expected("at least 1").Found(std::to_string(request.max_tokens));
  }
  if (request.priority < kMinPriority || request.priority > kMaxPriority) {
    throw Error(Code::kUsage, "priority").Expected("-1, 0 or 1").Found(std::to_string(request.priority));
  }
}

}  // namespace

Load Step::load() const {
  Load load;
  for (const DecodeRows& one : decode) {
    load.decode += one.rows;
    load.decode_keys += KeysOf(one.sequence->computed, one.rows);
  }
  for (const PrefillRows& one : prefill) {
    load.prefill += one.rows;
    load.prefill_keys += KeysOf(one.begin, one.rows);
  }
  return load;
}

Scheduler::Scheduler(std::vector<PageGroup> groups, int64_t slots, const Limits& limits,
                     std::optional<int64_t> rope_above, const CostModel& cost)
    : limits(limits),
      pool_(std::move(groups), slots),
      tree_(&pool_, limits.recompute_above, rope_above),
      cost_(cost),
      admission_(&pool_, &tree_, this->limits) {
  admission_.on_preemption = [this](const Sequence& sequence) { Unplan(sequence); };
}

SequencePointer Scheduler::Submit(Request request) {
  Check(request);
  const auto tokens = static_cast<int64_t>(request.tokens.size());
  if (tokens >= limits.context) {
    throw Error(Code::kUsage, "the prompt is too long")
        .Expected("less than " + std::to_string(limits.context) + " tokens")
        .Found(std::to_string(tokens));
  }
  const int64_t most = request.max_tokens < limits.context - tokens ? tokens + request.max_tokens : limits.context;
  for (const PageGroup& group : pool_.groups) {
    if (PagesAtOnce(group.window, most, limits.prefill_chunk) <= group.pages) continue;
    throw Error(Code::kUsage, "prompt and answer")
        .Expected("at most " + std::to_string(group.pages * kPage) + " tokens")
        .Found(std::to_string(most));
  }
  if (static_cast<int64_t>(admission_.waiting_count()) >= limits.queue) {
    throw Error(Code::kResource, std::to_string(limits.queue) + " requests wait already").Next("try again later");
  }
  auto sequence = std::make_shared<Sequence>(next_id_++, std::move(request), pool_.groups.size());
  sequence->tokens.reserve(static_cast<size_t>(most));
  for (auto& table : sequence->tables) table.reserve(static_cast<size_t>(PagesOf(most)));
  if (const auto deadline_s = sequence->request.deadline_s) deadlines_[{*deadline_s, sequence->id}] = sequence;
  admission_.Move(sequence, State::kWaiting);
  return sequence;
}

bool Scheduler::Cancel(const SequencePointer& sequence, End end) {
  if (sequence->state == State::kEnded) return false;
  if (end == End::kError) tree_.Discard(sequence.get());
  sequence->end = end;
  Finish(sequence);
  return true;
}

void Scheduler::Finish(const SequencePointer& sequence) {
  if (const auto deadline_s = sequence->request.deadline_s) deadlines_.erase({*deadline_s, sequence->id});
  if (head_ == sequence) head_ = nullptr;
  admission_.Finish(sequence);
}

std::vector<Event> Scheduler::Expire(double now) {
  std::vector<Event> events;
  while (!deadlines_.empty() && deadlines_.begin()->first.first <= now) {
    const SequencePointer sequence = deadlines_.begin()->second;
    Cancel(sequence, End::kTimeout);
    events.push_back({sequence, {}, End::kTimeout});
  }
  return events;
}

const Step* Scheduler::Plan(double now) {
  AgeHead(now);
  step_.decode.clear();
  step_.prefill.clear();
  step_.planned = planned_ = now;
  admission_.forking = 0;
  searched_s_ = 0;
  if (searches_) {
    using Clock = std::chrono::steady_clock;
    const auto began = Clock::now();
    if (DraftAnswers()) searched_s_ = std::chrono::duration<double>(Clock::now() - began).count();
  }
  PlanAnswers();
  PlanPrompts(now);
  head_rows_ = prefill_rows_ = 0;
  for (const PrefillRows& one : step_.prefill) {
    prefill_rows_ += one.rows;
    if (one.sequence == head_) head_rows_ += one.rows;
  }
  step_.copies = pool_.TakeCopies();
  return step_.decode.empty() && step_.prefill.empty() ? nullptr : &step_;
}

// Drafts for running sequences where the expected gain pays for the extra rows. Returns whether any was looked for.
bool Scheduler::DraftAnswers() {
  const Ordered& running = admission_.running;
  const auto answers = static_cast<int64_t>(running.size());
  const int64_t room = std::min(kMostDrafted, limits.decode_rows - answers);
  const auto drafts_itself = [](const SequencePointer& one) { return one->request.drafts; };
  if (room <= 0 || std::none_of(running.begin(), running.end(), drafts_itself)) return false;
  Load load;
  load.decode = answers;
  for (const SequencePointer& one : running) load.decode_keys += one->length();
  if (!cost_.MayDraft(load, room)) return false;
  drafts_.clear();
  for (const SequencePointer& one : running) {
    Draft& draft = drafts_.emplace_back();
    if (!one->request.drafts) continue;
    if (!one->lookup) one->lookup.emplace(one->request.stop_ids);
    draft = one->lookup->Propose(one->tokens);
    if (one->head) draft = one->head->Choose(draft, one->length());
    const int64_t left = std::min(one->request.max_tokens - one->answer(), limits.context - one->length()) - 1;
    draft.tokens.Cut(left);
  }
  KeepDrafts(load, room);
  return true;
}

// Gives each running sequence as many tokens of its draft as pay, the most probable ones of all first.
void Scheduler::KeepDrafts(const Load& load, int64_t room) {
  gains_.clear();
  owners_.clear();
  counts_.assign(drafts_.size(), 0);
  next_gains_.clear();  // of the next token of each draft
  for (const Draft& one : drafts_) next_gains_.push_back(one.tokens.empty() ? 0 : one.rate);
  while (static_cast<int64_t>(gains_.size()) < room) {
    const auto best = std::max_element(next_gains_.begin(), next_gains_.end());
    if (*best <= 0) break;
    const auto index = static_cast<size_t>(best - next_gains_.begin());
    gains_.push_back(*best);
    owners_.push_back(index);
    *best = ++counts_[index] < drafts_[index].tokens.size() ? *best * drafts_[index].rate : 0;
  }
  owners_.resize(static_cast<size_t>(cost_.DraftRows(load, gains_)));
  for (const size_t index : owners_) {
    FewTokens& draft = admission_.running[index]->draft;
    draft.push_back(drafts_[index].tokens[draft.size()]);
  }
}

// Slots beyond those that answers, prompts and a request that waits need.
int64_t Scheduler::SlotsForDrafts() const {
  const auto answers = static_cast<int64_t>(admission_.running.size());
  const auto prompts = static_cast<int64_t>(admission_.prefilling.size());
  const int64_t needed = answers + 2 * prompts + (admission_.waiting_count() ? answers + 2 : 0);
  return std::max<int64_t>(0, pool_.units.back().available() - needed);
}

// A row of each running sequence, and its draft.
void Scheduler::PlanAnswers() {
  answering_ = admission_.running;
  const auto limit = limits.recompute_above;
  int64_t room = pool_.has_slots() ? SlotsForDrafts() : 0;
  for (const SequencePointer& sequence : answering_) {
    FewTokens& draft = sequence->draft;
    if (pool_.has_slots()) {
      // A state at the end of a page may become a checkpoint: no draft goes beyond.
      const int64_t border = kPage - 1 - sequence->computed % kPage;
      draft.Cut(std::min(room, border));
      room -= static_cast<int64_t>(draft.size());
    }
    const int64_t length = sequence->length() + static_cast<int64_t>(draft.size());
    if (limit && length > *limit && *limit >= sequence->decode_from) draft = {};  // its rows would have other frequencies
    while (sequence->state == State::kRunning &&
           !tree_.Reserve(sequence.get(), 1 + static_cast<int64_t>(draft.size()))) {
      if (draft.empty()) admission_.PreemptFor(*sequence);
      else draft = {};
    }
    const int64_t rows = 1 + static_cast<int64_t>(draft.size());
    if (sequence->state == State::kRunning) step_.decode.push_back({sequence, rows, rows});
  }
}

// Fills the rest of the step: prompts, and answers of preempted sequences.
void Scheduler::PlanPrompts(double now) {
  int64_t rows = limits.prefill_chunk;
  Ordered ordered = Sorted(now);
  if (ordered.empty()) {
    head_ = nullptr;
    return;
  }
  const Load load = step_.load();
  if (!step_.decode.empty()) rows = cost_.PromptRows(load, limits.step_s, ordered[0]->computed, rows);
  ordered = ShorterFirst(std::move(ordered), rows, now);
  int64_t decode_rows = limits.decode_rows - load.decode;
  bool full = false;  // no request passes one for which there is no room
  for (const SequencePointer& sequence : ordered) {
    if (rows <= 0) break;
    if (sequence->state == State::kWaiting && (full || !admission_.Admit(sequence))) {
      full = full || !sequence->leader;
      continue;
    }
    if (sequence->computed < sequence->decode_from) {
      rows -= PlanPrefill(sequence, rows);
    } else {
      const int64_t fits = cost_.DecodeRowsFor(rows), count = PlanDecode(sequence, std::min(decode_rows, fits));
      decode_rows -= count;
      rows -= (count * rows + fits - 1) / fits;
    }
  }
}

// Admitted prompts and requests that could be admitted now, with some more: by level, admitted ones first, then by arrival.
Ordered Scheduler::Sorted(double now) const {
  Ordered all = admission_.prefilling;
  const size_t most = all.size() + static_cast<size_t>(std::max<int64_t>(0, admission_.places())) + kLookAhead;
  for (const Ordered& sequences : admission_.waiting) all.insert(all.end(), sequences.begin(), sequences.end());
  const auto key = [now](const SequencePointer& one) {
    return std::make_tuple(-LevelOf(*one, now), one->state == State::kWaiting, one->request.arrival, one->id);
  };
  std::sort(all.begin(), all.end(), [&](const auto& a, const auto& b) { return key(a) < key(b); });
  if (all.size() > most) all.resize(most);
  return all;
}

// A prompt of more than a step lets those of its level that are half as long pass, while its patience lasts.
Ordered Scheduler::ShorterFirst(Ordered ordered, int64_t rows, double now) {
  head_ = ordered[0];
  if (head_->left() <= rows || head_->passed_s >= kPatienceS) return ordered;
  const int64_t level = LevelOf(*head_, now);
  const auto rest = std::stable_partition(ordered.begin(), ordered.end(), [&](const SequencePointer& one) {
    return 2 * one->left() <= head_->left() && LevelOf(*one, now) == level;
  });
  std::stable_sort(ordered.begin(), rest, [](const auto& a, const auto& b) { return a->left() < b->left(); });
  return ordered;
}

// Counts the last step for or against the long prompt that was first in it: it should have half of the rows.
void Scheduler::AgeHead(double now) {
  if (!head_) return;
  const double elapsed = now - planned_;
  head_->passed_s = 2 * head_rows_ < prefill_rows_ ? head_->passed_s + elapsed : std::max(0.0, head_->passed_s - elapsed);
}

// Rows of a prompt, up to the end of a page if not all. Returns how many.
int64_t Scheduler::PlanPrefill(const SequencePointer& sequence, int64_t rows) {
  const int64_t begin = sequence->computed;
  int64_t end = sequence->decode_from;
  if (end - begin > rows) {
    end = (begin + rows) / kPage * kPage;
    if (!pool_.has_slots() || limits.prefill_chunk < kPage) end = std::max(end, begin + std::min(rows, kPage));
    end = tree_.ChunkBefore(begin, end, sequence->request.borders);
  } else {
    end = tree_.CheckpointBefore(begin, end, sequence->request.borders);
  }
  const int64_t count = end > begin ? ReserveSome(sequence.get(), end - begin) : 0;
  if (!count) return 0;
  std::vector<SequencePointer> drawing;
  if (begin + count == sequence->length()) {
    drawing = admission_.SamePrompt(sequence);
    drawing.insert(drawing.begin(), sequence);
  }
  step_.prefill.push_back({sequence, begin, count, std::move(drawing)});
  return count;
}

// Rows of an answer that was preempted. Returns how many.
int64_t Scheduler::PlanDecode(const SequencePointer& sequence, int64_t rows) {
  const int64_t count = ReserveSome(sequence.get(), std::min(sequence->left(), std::max<int64_t>(0, rows)));
  if (count) step_.decode.push_back({sequence, count, count == sequence->left() ? 1 : 0});
  return count;
}

// Pages for so many rows, or for less, or for none where answers took what a prompt was promised.
int64_t Scheduler::ReserveSome(Sequence* sequence, int64_t rows) {
  while (rows && !tree_.Reserve(sequence, rows)) {
    if (rows > kPage) {
      rows = (rows - 1) / kPage * kPage;
    } else if (!step_.decode.empty() || !step_.prefill.empty() || !admission_.PreemptFor(*sequence)) {
      return 0;
    }
  }
  return rows;
}

// The sequence is preempted, perhaps after its rows were planned.
void Scheduler::Unplan(const Sequence& sequence) {
  const auto of = [&](const auto& rows) { return rows.sequence.get() == &sequence; };
  step_.decode.erase(std::remove_if(step_.decode.begin(), step_.decode.end(), of), step_.decode.end());
  step_.prefill.erase(std::remove_if(step_.prefill.begin(), step_.prefill.end(), of), step_.prefill.end());
}

const std::vector<Event>& Scheduler::Settle(const Step& step, const std::vector<int32_t>& drawn, double now) {
  const Load load = step.load();
  cost_.Observe(load, now - step.planned);
  events_.clear();
  size_t at = 0;
  for (const DecodeRows& one : step.decode) {
    if (one.sequence->state != State::kEnded) GotAnswer(one, drawn.data() + at);
    at += static_cast<size_t>(one.logits);
  }
  if (searched_s_ > 0 && !step.decode.empty() && step.prefill.empty()) LearnOfSearch(load, step, now - step.planned);
  searches_ = search_.Pays();
  for (const PrefillRows& one : step.prefill) {
    const size_t first = at;
    at += one.drawing.size();
    if (one.sequence->state == State::kEnded) continue;
    pool_.Advance(one.sequence.get(), one.rows);
    if (one.drawing.empty()) Got(one.sequence, {});
    std::vector<bool> started;
    for (const SequencePointer& each : one.drawing) {
      started.push_back(each == one.sequence || admission_.Fork(*one.sequence, each));
    }
    for (size_t i = 0; i < one.drawing.size(); ++i) {
      if (!started[i]) continue;
      one.drawing[i]->Push(drawn[first + i], limits.context);
      FewTokens token;
      token.push_back(drawn[first + i]);
      Got(one.drawing[i], token);
    }
  }
  return events_;
}

void Scheduler::GotAnswer(const DecodeRows& rows, const int32_t* drawn) {
  Sequence* const sequence = rows.sequence.get();
  const FewTokens draft = std::exchange(sequence->draft, {});
  const auto drafted = static_cast<int64_t>(draft.size());
  int64_t standing = 0;  // drafted tokens that were drawn
  while (standing < drafted && draft[static_cast<size_t>(standing)] == drawn[standing]) ++standing;
  sequence->drafted += drafted;
  sequence->accepted += standing;
  FewTokens kept;  // up to one that ends the answer
  for (int64_t at = 0; rows.logits && at <= standing && !sequence->end; ++at) {
    sequence->Push(drawn[at], limits.context);
    kept.push_back(drawn[at]);
  }
  const size_t of_draft = kept.empty() ? 0 : kept.size() - 1;
  if (sequence->head && drafted) sequence->head->Checked(drafted, standing);
  pool_.Advance(sequence, rows.rows - drafted + static_cast<int64_t>(of_draft), of_draft, draft.size());
  Got(rows.sequence, kept);
  if (!draft.empty()) pool_.Truncate(sequence, sequence->computed);
}

// How long looking for drafts took, and what its drafts saved of the step.
void Scheduler::LearnOfSearch(const Load& load, const Step& step, double elapsed) {
  const auto answers = static_cast<int64_t>(step.decode.size());
  double saved = 0;
  if (load.decode > answers) {
    size_t tokens = 0;
    for (const Event& event : events_) tokens += event.tokens.size();
    const double alone = cost_.DecodeSeconds({answers, load.decode_keys * answers / load.decode, 0, 0});
    saved = alone * static_cast<double>(tokens) / static_cast<double>(answers) - (elapsed - searched_s_);
  }
  search_.Learn(searched_s_, saved, elapsed);
}

// The sequence was computed further, and has these new tokens.
void Scheduler::Got(const SequencePointer& sequence, const FewTokens& tokens) {
  if (sequence->computed / kPage > sequence->shared) {
    tree_.Add(sequence.get());
    tree_.LeaveCheckpoint(sequence.get());
  }
  pool_.Slide(sequence.get(), sequence->computed);
  if (!tokens.empty()) events_.push_back({sequence, tokens, sequence->end});
  if (sequence->end) {
    Finish(sequence);
  } else if (Crossed(*sequence)) {
    pool_.Release(sequence.get());
    sequence->decode_from = sequence->length();
    admission_.Move(sequence, State::kPrefilling);
  } else if (sequence->left() == 1 && sequence->computed >= sequence->decode_from) {
    admission_.Move(sequence, State::kRunning);
  }
}

// Whether RoPE's frequencies are others from now on.
bool Scheduler::Crossed(const Sequence& sequence) const {
  const auto limit = limits.recompute_above;
  return limit && sequence.length() > *limit && *limit >= sequence.decode_from;
}

}  // namespace mlcpipe::serving
