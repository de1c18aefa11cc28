#include "serving/batch.h"

#include "model.h"
#include "plan.h"
#include "workspace.h"

namespace mlcpipe::serving {
namespace {

using tvm::runtime::Tensor;

Limits LimitsOf(const ModelInfo& model, int64_t context_length, int64_t sequences) {
  Limits limits;
  limits.context = context_length;
  limits.prefill_chunk = model.prefill_chunk;
  limits.decode_rows = kDecodeRows;
  limits.sequences = sequences;
  limits.recompute_above = model.recompute_above;
  return limits;
}

}  // namespace

Batch::Batch(const Manifest& manifest, const Device& device, const Library& library, TokenTables weights, const Plan& plan,
             const Options& options, const int* cancelled)
    : manifest_(manifest),
      device_(device),
      decode_(library.Get(DraftsByHead(manifest.model, options) ? "decode_hidden" : "decode")),
      prefill_(library.Get(DraftsByHead(manifest.model, options) ? "prefill_hidden" : "prefill")),
      weights_(std::move(weights)),
      states_(MakeStates(manifest.states, device, plan.units)),
      drafts_(options.draft != "off"),
      cancelled_(cancelled),
      plan_(plan),
      sequences_(options.sequences),
      buffer_(plan.units.pages.size(), manifest.states.has_slots()),
      sampler_(device, library, manifest.model.vocab_size, std::max(kDecodeRows, options.sequences)),
      decode_logits_(device.Empty({kDecodeRows, manifest.model.vocab_size}, kFloat32)),
      prefill_logits_(device.Empty({options.sequences, manifest.model.vocab_size}, kFloat32)) {
  if (DraftsByHead(manifest.model, options)) {
    head_.emplace(manifest, device, library, plan.kv_tokens, kDecodeRows, options.sequences);
  }
  MakeScheduler();
}

void Batch::MakeScheduler() {
  scheduler_.emplace(GroupsOf(manifest_.states, plan_.units), plan_.units.slots,
                     LimitsOf(manifest_.model, plan_.context_length, sequences_), manifest_.model.rope_above, CostModel());
}

uint64_t Batch::Submit(Client client) {
  const std::lock_guard<std::mutex> lock(mutex_);
  client.request.arrival = Now();
  if (client.timeout_s) client.request.deadline_s = client.request.arrival + *client.timeout_s;
  come_.emplace(next_, std::move(client));
  return next_++;
}

void Batch::Cancel(uint64_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  gone_.push_back(number);
}

// Takes one client after the other: where the memory ends, the others are still known.
void Batch::TakeNews() {
  std::vector<uint64_t> gone;
  for (bool left = true; left;) {
    std::map<uint64_t, Client>::node_type come;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!come_.empty()) come = come_.extract(come_.begin());
      else gone.swap(gone_);
    }
    left = !come.empty();
    if (left) Begin(come.key(), std::move(come.mapped()));
  }
  for (const uint64_t number : gone) {
    const auto of = [number](const auto& one) { return one.second.first == number; };
    const auto found = std::find_if(answers_.begin(), answers_.end(), of);
    if (found == answers_.end()) continue;
    scheduler_->Cancel(found->second.second.sequence, End::kCancelled);
    const Error error(Code::kCancelled, "the answer was cancelled");
    EndAnswer(found->first, std::nullopt, &error);
  }
}

void Batch::Begin(uint64_t number, Client client) {
  Answer answer;
  answer.came = Clock::now();
  answer.client = std::move(client);
  Request& request = answer.client.request;
  request.drafts = drafts_;
  answer.statistics.prompt_tokens = static_cast<int64_t>(request.tokens.size());
  const auto refuse = [&](const Error& error) { Tell(answer.client, answer.statistics, std::nullopt, &error); };
  try {
    answer.row.emplace(manifest_.model.vocab_size, answer.client.sampling, request.tokens);
    answer.sequence = scheduler_->Submit(request);
    answers_.try_emplace(answer.sequence->id, number, std::move(answer));
  } catch (const Error& error) {
    refuse(error);
  } catch (const std::bad_alloc&) {
    refuse(no_memory_);  // first: the rest may throw
    if (answer.sequence) scheduler_->Cancel(answer.sequence, End::kError);
  }
}

size_t Batch::Step() {
  try {
    if (!scheduler_) MakeScheduler();
    TakeNews();
    if (head_) head_->Propose(&*scheduler_, [this](const Sequence& one) { return RowOfAnswer(one); }, weights_);
    Deliver(scheduler_->Expire(Now()));
    if (const serving::Step* const step = scheduler_->Plan(Now())) Advance(*step);
  } catch (const std::bad_alloc&) {
    StartOver(no_memory_);
  } catch (const Error& error) {
    StartOver(error);
  } catch (const std::exception& error) {
    try {
      StartOver(Error(Code::kInternal, "the runtime failed").Found(error.what()));
    } catch (const std::bad_alloc&) {
      StartOver(no_memory_);
    }
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  return answers_.size() + come_.size();
}

void Batch::Advance(const serving::Step& step) {
  taking_ = false;
  try {
    Compute(step);
    taking_ = true;
    Deliver(scheduler_->Settle(step, drawn_, Now()));
  } catch (const Error& error) {
    Fail(step, error);
  } catch (const tvm::ffi::Error& error) {
    ReclaimWorkspaces();
    const bool ended = __atomic_load_n(cancelled_, __ATOMIC_RELAXED);
    Fail(step, ended ? Error(Code::kCancelled, "the engine was closed")
                     : FromTvm(error, Code::kInternal, "the compiled library failed"));
  } catch (const std::bad_alloc&) {
    if (taking_) throw;
    Fail(step, no_memory_);
  }
}

// Sequences were left half changed: all answers end, and the next step makes another scheduler, without prefixes.
void Batch::StartOver(const Error& error) {
  std::map<uint64_t, Client> come;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    come.swap(come_);
  }
  for (const auto& [number, client] : come) Tell(client, {}, std::nullopt, &error);
  while (!answers_.empty()) {
    const auto ended = answers_.extract(answers_.begin());
    Tell(ended.mapped().second.client, ended.mapped().second.statistics, std::nullopt, &error);
  }
  if (head_) head_->GiveUp();
  scheduler_.reset();
}

void Batch::Compute(const serving::Step& step) {
  for (const PageCopy& copy : step.copies) CopyPage(manifest_.states, states_, copy);
  drawn_.clear();
  if (!step.decode.empty()) Decode(step);
  if (!step.prefill.empty()) Prefill(step);
}

void Batch::Decode(const serving::Step& step) {
  ids_.clear();
  spans_.clear();
  rows_.clear();
  for (const auto& [sequence, count, logits] : step.decode) {
    if (head_) head_->KeepOfAnswer({sequence, static_cast<int64_t>(ids_.size()), sequence->computed, count});
    const FewTokens& draft = sequence->draft;
    const auto begin = sequence->tokens.begin() + sequence->computed;
    ids_.insert(ids_.end(), begin, begin + count - static_cast<int64_t>(draft.size()));
    ids_.insert(ids_.end(), draft.begin(), draft.end());
    spans_.push_back(SpanOf(*sequence, sequence->computed, count));
    rows_.resize(ids_.size());
    for (int64_t row = count - logits; row < count; ++row) {
      const size_t at = rows_.size() - static_cast<size_t>(count - row);
      rows_[at] = {sequence, sequence->computed + row + 1, static_cast<size_t>(row - (count - logits))};
    }
  }
  SetRows(decode_logits_, static_cast<int64_t>(ids_.size()));
  const Tensor& step_data = buffer_.Fill(spans_.data(), spans_.size());
  const Tensor& ids = ids_data_.Fill(ids_);
  {
    const DecodeStep timed(step_threads_, static_cast<int64_t>(ids_.size()));
    if (head_) {
      SetRows(head_->hidden, static_cast<int64_t>(ids_.size()));
      decode_(device_.Put(ids), head_->hidden, device_.Put(step_data), decode_logits_, states_, weights_.For(ids));
    } else {
      decode_(device_.Put(ids), device_.Put(step_data), decode_logits_, states_, weights_.For(ids));
    }
  }
  Draw(decode_logits_);
}

void Batch::Prefill(const serving::Step& step) {
  ids_.clear();
  wanted_.clear();
  spans_.clear();
  rows_.clear();
  for (const auto& [sequence, begin, count, drawing] : step.prefill) {
    if (head_) head_->KeepOfPrompt({sequence, static_cast<int64_t>(ids_.size()), begin, count});
    const auto first = sequence->tokens.begin() + begin;
    ids_.insert(ids_.end(), first, first + count);
    spans_.push_back(SpanOf(*sequence, begin, count));
    for (const SequencePointer& one : drawing) {
      rows_.push_back({one, begin + count});
      wanted_.push_back(static_cast<int32_t>(ids_.size()) - 1);
    }
  }
  if (wanted_.empty()) wanted_.push_back(0);  // no kernel takes no rows
  SetRows(prefill_logits_, static_cast<int64_t>(wanted_.size()));
  {
    mlcpipe_pool_watch(cancelled_, static_cast<int64_t>(ids_.size()));
    const struct Unwatch {
      ~Unwatch() { mlcpipe_pool_watch(nullptr, 0); }
    } unwatch;
    mlcpipe_pool_begin_step(step_threads_, INT64_MAX);
    const Tensor& ids = ids_data_.Fill(ids_);
    const Tensor &wanted = wanted_data_.Fill(wanted_), &data = buffer_.Fill(spans_.data(), spans_.size());
    if (head_) {
      SetRows(head_->hidden_of_prompts, static_cast<int64_t>(ids_.size()));
      prefill_(device_.Put(ids), device_.Put(wanted), head_->hidden_of_prompts, device_.Put(data), prefill_logits_, states_,
               weights_.For(ids));
    } else {
      prefill_(device_.Put(ids), device_.Put(wanted), device_.Put(data), prefill_logits_, states_, weights_.For(ids));
    }
  }
  if (!rows_.empty()) Draw(prefill_logits_);
}

// Appends the token of each of `rows_` that has a sequence.
void Batch::Draw(const Tensor& logits) {
  draws_.clear();
  for (const Drawing& row : rows_) {
    draws_.push_back({row.sequence ? RowOfAnswer(*row.sequence) : nullptr, static_cast<uint64_t>(row.position),
                      row.sequence ? row.sequence->draft.begin() : nullptr, row.drafted});
  }
  const int32_t* const tokens = sampler_.Draw(logits, draws_.data(), draws_.size());
  taking_ = true;
  bool stands = true;  // all drafted tokens before a row were drawn
  for (size_t at = 0; at < rows_.size(); ++at) {
    const Drawing& row = rows_[at];
    if (!row.sequence) continue;
    const size_t before = row.drafted;
    stands = !before || (stands && drawn_.back() == row.sequence->draft[before - 1]);
    drawn_.push_back(stands ? Take(row, tokens[at]) : std::max(tokens[at], 0));
  }
  taking_ = false;
}

Row* Batch::RowOfAnswer(const Sequence& sequence) {
  const auto found = answers_.find(sequence.id);
  return found == answers_.end() ? nullptr : &*found->second.second.row;
}

// The token that was drawn, 0 for an answer that has ended or ends here.
int32_t Batch::Take(const Drawing& row, int32_t token) {
  const auto found = answers_.find(row.sequence->id);
  if (found == answers_.end()) return 0;
  if (token >= 0) {
    found->second.second.row->Accept(token);
    return token;
  }
  scheduler_->Cancel(row.sequence, End::kError);
  const Error error = Error(Code::kCompute, "the model computed numbers that are not finite")
                          .Where("token " + std::to_string(row.position));
  EndAnswer(row.sequence->id, std::nullopt, &error);
  return 0;
}

void Batch::Deliver(const std::vector<Event>& events) {
  for (const auto& [sequence, tokens, end] : events) {
    const auto found = answers_.find(sequence->id);
    if (found == answers_.end()) continue;
    Answer& answer = found->second.second;
    Statistics& statistics = answer.statistics;
    statistics.cached_tokens = sequence->cached.value_or(0);
    statistics.miss = sequence->miss;
    statistics.drafted_tokens = sequence->drafted;
    statistics.accepted_tokens = sequence->accepted;
    const auto now = Clock::now();
    if (!tokens.empty() && !statistics.completion_tokens) {
      answer.first = now;
      statistics.prefill_s = std::chrono::duration<double>(now - answer.came).count();
    } else if (!tokens.empty()) {
      statistics.decode_s = std::chrono::duration<double>(now - answer.first).count();
      statistics.decode_bytes += manifest_.DecodeBytes(sequence->length() - static_cast<int64_t>(tokens.size()));
    }
    Verdict verdict = Verdict::kGoOn;
    for (size_t at = 0; at < tokens.size() && verdict == Verdict::kGoOn; ++at) {
      ++statistics.completion_tokens;
      verdict = answer.client.on_token(tokens[at]);
    }
    if (verdict == Verdict::kStop || end == End::kStop) {
      scheduler_->Cancel(sequence, End::kStop);
      EndAnswer(sequence->id, Finish::kStop, nullptr);
    } else if (end) {
      EndAnswer(sequence->id, end == End::kTimeout ? Finish::kTimeout : Finish::kLength, nullptr);
    } else if (verdict == Verdict::kCancel) {
      scheduler_->Cancel(sequence, End::kCancelled);
      const Error error(Code::kCancelled, "the answer was cancelled");
      EndAnswer(sequence->id, std::nullopt, &error);
    }
  }
}

void Batch::Fail(const serving::Step& step, const Error& error) {
  std::vector<SequencePointer> sequences;
  for (const DecodeRows& one : step.decode) sequences.push_back(one.sequence);
  for (const PrefillRows& one : step.prefill) sequences.push_back(one.sequence);
  for (const SequencePointer& sequence : sequences) {
    scheduler_->Cancel(sequence, End::kError);
    EndAnswer(sequence->id, std::nullopt, &error);
  }
}

void Batch::EndAnswer(int64_t id, std::optional<Finish> finish, const Error* error) {
  const auto found = answers_.find(id);
  if (found == answers_.end()) return;
  const Answer answer = std::move(found->second.second);
  answers_.erase(found);
  Tell(answer.client, answer.statistics, finish, error);
}

void Batch::Tell(const Client& client, const Statistics& statistics, std::optional<Finish> finish,
                 const Error* error) const {
  try {
    client.on_end(statistics, finish, error);
  } catch (const std::bad_alloc&) {
    client.on_end(statistics, std::nullopt, &no_memory_);  // whose words are there
  }
}

}  // namespace mlcpipe::serving
