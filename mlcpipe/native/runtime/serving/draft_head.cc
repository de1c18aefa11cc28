#include "serving/draft_head.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "model.h"
#include "workspace.h"

namespace mlcpipe::serving {
namespace {

using tvm::runtime::Tensor;
using Clock = std::chrono::steady_clock;

constexpr int64_t kMostEach = 8;        // tokens of a draft
constexpr int64_t kTrials = 8;          // rounds of drafts before the costs are known
constexpr int64_t kTrialLength = 3;     // of these drafts
constexpr int64_t kRetryAfter = 64;     // steps without drafts, after which one round tells whether they pay now
constexpr double kMinGain = 0.2;        // share of a step's time that drafting must save
constexpr int64_t kMaxDecodeRows = 4;   // waiting rows of an answer that decode computes; more are computed as a prompt

double SecondsSince(Clock::time_point began) { return std::chrono::duration<double>(Clock::now() - began).count(); }

Load LoadOf(const std::vector<SequencePointer>& sequences) {
  Load load;
  load.decode = static_cast<int64_t>(sequences.size());
  for (const SequencePointer& one : sequences) load.decode_keys += one->length();
  return load;
}

}  // namespace

DraftHead::DraftHead(const Manifest& manifest, const Device& device, const Library& library, int64_t kv_tokens, int64_t rows,
                     int64_t sequences)
    : hidden(device.Empty({rows, manifest.model.draft_head->kept}, kFloat32)),
      hidden_of_prompts(device.Empty({manifest.model.prefill_chunk, manifest.model.draft_head->kept}, kFloat32)),
      device_(device),
      info_(*manifest.model.draft_head),
      vocab_(manifest.model.vocab_size),
      prefill_chunk_(manifest.model.prefill_chunk),
      prompt_(library.Get("draft_prompt")),
      first_(library.Get("draft_first")),
      next_(library.Get("draft_next")),
      pool_({PageGroup{PagesOf(kv_tokens)}}, 0),
      tree_(&pool_, std::nullopt, std::nullopt),
      pages_({device.Empty({PagesOf(kv_tokens), info_.page_bytes}, kInt8)}),
      out_(device.Empty({sequences, info_.hidden_size}, kFloat32)),
      logits_(device.Empty({sequences, vocab_}, kFloat32)),
      sampler_(device, library, vocab_, sequences),
      buffer_(1, false) {}

void DraftHead::Propose(Scheduler* scheduler, const RowOf& row_of, const TokenTables& weights) {
  if (failed_) return;
  weights_ = &weights;
  std::vector<SequencePointer> answers;
  std::vector<double> rates;
  for (const SequencePointer& one : scheduler->running()) {
    if (!Follows(one.get())) continue;
    answers.push_back(one);
    rates.push_back(one->head->rate());
  }
  try {
    for (auto one = followers_.begin(); one != followers_.end();) {
      const int64_t id = one->first;
      const State state = (one++)->second.answer->state;
      if (state == State::kWaiting || state == State::kEnded) Release(id);
    }
    FollowPrompts(Followed(std::exchange(prompt_rows_, {})));
    const auto began = Clock::now();
    FollowAnswers(Followed(std::exchange(rows_, {})));
    const double followed_s = SecondsSince(began);
    if (answers.empty()) return;
    const int64_t length = Length(scheduler, rates);
    if (length) Draft(answers, length, scheduler->limits.context, row_of);
    const double step_s = scheduler->cost().DecodeSeconds(LoadOf(scheduler->running()));
    following_.Learn(followed_s, length ? kMinGain * step_s : 0, step_s);
  } catch (const tvm::ffi::Error&) {  // answers need no drafts
    ReclaimWorkspaces();
    GiveUp();
  } catch (const std::bad_alloc&) {
    GiveUp();
  }
}

void DraftHead::GiveUp() {
  failed_ = true;
  rows_.clear();
  prompt_rows_.clear();
  followers_.clear();
}

// Whether the head keeps up with an answer: with all of them, or some where that takes too long.
bool DraftHead::Follows(Sequence* sequence) {
  if (!sequence->request.drafts) return false;
  if (!sequence->head) sequence->head.emplace(following_.Pays(), &rate_);
  return sequence->head->followed;
}

std::vector<KeptRows> DraftHead::Followed(std::vector<KeptRows> kept) {
  const auto drop = [this](const KeptRows& one) {
    return one.sequence->state == State::kEnded || !Follows(one.sequence.get());
  };
  kept.erase(std::remove_if(kept.begin(), kept.end(), drop), kept.end());
  return kept;
}

// Stores entries of prompts, from the rows on the device; existing ones are replaced by equal ones. Kernels take rows from the
// first on: what follows a prompt that nobody follows is left out.
void DraftHead::FollowPrompts(const std::vector<KeptRows>& kept) {
  std::vector<std::pair<Follower*, const KeptRows*>> pairs;
  std::vector<Span> spans;
  std::vector<int32_t> tokens;
  bool fits = true;
  for (const KeptRows& rows : kept) {
    if (rows.row != static_cast<int64_t>(tokens.size())) break;
    Follower* const follower = Follow(rows.sequence, rows.position, rows.size).first;
    const int64_t begin = rows.position - follower->offset;
    fits = fits && begin >= 0 && Reserve(&follower->mine, follower->mine.length());
    const auto first = rows.sequence->tokens.begin() + rows.position + 1;
    tokens.insert(tokens.end(), first, first + rows.size);
    pairs.emplace_back(follower, &rows);
    spans.push_back(SpanOf(follower->mine, begin, rows.size));
  }
  if (!fits) {
    for (const KeptRows& rows : kept) Release(rows.sequence->id);
  }
  if (!fits || pairs.empty()) return;
  Store(spans, tokens, ViewOf(hidden_of_prompts, {static_cast<int64_t>(tokens.size()), info_.kept}));
  const auto row_bytes = static_cast<size_t>(info_.kept) * sizeof(float);
  for (const auto& [follower, rows] : pairs) {
    Sequence* const mine = &follower->mine;
    mine->computed = mine->length();
    follower->waiting.clear();
    if (rows->sequence->state == State::kRunning) {  // the first draft is guessed from the last row
      follower->waiting.resize(static_cast<size_t>(info_.kept));
      CopyOut(hidden_of_prompts, static_cast<size_t>(rows->row + rows->size - 1) * row_bytes, follower->waiting.data(), row_bytes);
      --mine->computed;
    }
    MakeFindable(follower);
  }
}

// Queues the rows of answers that stand.
void DraftHead::FollowAnswers(const std::vector<KeptRows>& kept) {
  const auto row_bytes = static_cast<size_t>(info_.kept) * sizeof(float);
  for (const KeptRows& rows : kept) {
    const int64_t stand = std::min(rows.size, rows.sequence->computed - rows.position);
    if (stand <= 0) continue;
    const auto [follower, added] = Follow(rows.sequence, rows.position, stand);
    if (added) {
      const size_t before = follower->waiting.size(), first = static_cast<size_t>(rows.row + stand - added);
      follower->waiting.resize(before + static_cast<size_t>(added * info_.kept));
      CopyOut(hidden, first * row_bytes, follower->waiting.data() + before, static_cast<size_t>(added) * row_bytes);
    }
    if (follower->mine.left() > kMaxWaitingRows) Release(rows.sequence->id);
  }
}

// The head's sequence for an answer, up to the end of its `rows` rows from `begin` on, and how many tokens are new.
std::pair<DraftHead::Follower*, int64_t> DraftHead::Follow(const SequencePointer& sequence, int64_t begin, int64_t rows) {
  const std::vector<int32_t>& text = sequence->tokens;
  auto found = followers_.find(sequence->id);
  if (found == followers_.end()) {
    Request request;  // its pages are for answers with this first token alone, which is none of its own
    request.tokens = {text.begin() + 1, text.end()};
    request.cache_salt = sequence->request.cache_salt + '\0' + std::to_string(text[0]);
    found = followers_.try_emplace(sequence->id, sequence, next_id_++, std::move(request)).first;
    Sequence* const mine = &found->second.mine;
    mine->decode_from = 0;
    tree_.Take(mine);
    mine->tokens.resize(static_cast<size_t>(mine->computed));
  }
  Follower* const follower = &found->second;
  follower->offset += std::max<int64_t>(0, begin - follower->end());
  const int64_t end = std::min(begin + rows + 1, sequence->length()), added = std::max<int64_t>(0, end - follower->end() - 1);
  follower->mine.tokens.insert(follower->mine.tokens.end(), text.begin() + (end - added), text.begin() + end);
  return {follower, added};
}

void DraftHead::Release(int64_t id) {
  const auto found = followers_.find(id);
  if (found == followers_.end()) return;
  pool_.Release(&found->second.mine);
  followers_.erase(found);
}

// Its full pages, if no entry is missing.
void DraftHead::MakeFindable(Follower* follower) {
  if (!follower->offset) tree_.Add(&follower->mine);
}

// Pages for the first `end` entries of a sequence.
bool DraftHead::Reserve(Sequence* mine, int64_t end) {
  return end <= mine->computed || tree_.Reserve(mine, end - mine->computed);
}

// How many tokens to draft for each of the answers with these rates.
int64_t DraftHead::Length(Scheduler* scheduler, const std::vector<double>& rates) {
  const Load load = LoadOf(scheduler->running());
  const int64_t each = scheduler->limits.decode_rows / load.decode - 1;
  const int64_t most = std::min({kMostEach, kMostDrafted / static_cast<int64_t>(rates.size()), each});
  if (most < 1 || !scheduler->searches()) return 0;
  if (rounds_ < kTrials) return std::min(kTrialLength, most);
  const double token_s = cost_.Seconds({static_cast<int64_t>(rates.size()), load.decode_keys, 0, 0});
  const int64_t length = scheduler->cost().DraftLength(load, rates, token_s, most);
  without_ = length ? 0 : without_ + 1;
  return length ? length : without_ % kRetryAfter == 0;
}

void DraftHead::Draft(const std::vector<SequencePointer>& answers, int64_t length, int64_t context, const RowOf& row_of) {
  std::vector<Drafted> drafts;
  for (const SequencePointer& one : answers) {
    const auto found = followers_.find(one->id);
    Row* const row = row_of(*one);
    if (found == followers_.end() || !row || one->length() + length >= context) continue;
    Follower* const follower = &found->second;
    const auto waiting = static_cast<int64_t>(follower->waiting.size()) / info_.kept;
    const bool ready = follower->end() == one->length() - 1 && waiting && waiting == follower->mine.left();
    if (ready && Reserve(&follower->mine, follower->mine.length() + length - 1)) drafts.push_back({follower, row, {}});
  }
  if (drafts.empty()) return;
  ++rounds_;
  const auto began = Clock::now();
  for (const Drafted& one : drafts) {
    if (one.follower->mine.left() > kMaxDecodeRows) CatchUp(one.follower);
  }
  GuessFirst(drafts);
  std::vector<RowDraw> rows;
  for (int64_t at = 0; at < length; ++at) {
    if (at) GuessNext(drafts);
    rows.clear();
    for (const auto& [follower, row, tokens] : drafts) {
      rows.push_back({row, static_cast<uint64_t>(follower->answer->length() + at), tokens.begin(), tokens.size()});
    }
    const int32_t* const drawn = sampler_.Draw(logits_, rows.data(), rows.size());
    for (size_t i = 0; i < drafts.size(); ++i) drafts[i].tokens.push_back(std::max(drawn[i], 0));
  }
  Load load{static_cast<int64_t>(drafts.size()), 0, 0, 0};
  for (const Drafted& one : drafts) load.decode_keys += one.follower->mine.length();
  cost_.Observe(load, SecondsSince(began) / static_cast<double>(length));
  for (const auto& [follower, row, tokens] : drafts) {
    follower->answer->head->Hold(tokens, follower->answer->length());
    pool_.Truncate(&follower->mine, follower->mine.computed);
    MakeFindable(follower);
  }
}

// Stores entries of all waiting rows but the last, a chunk at a time.
void DraftHead::CatchUp(Follower* follower) {
  Sequence* const mine = &follower->mine;
  std::vector<float>* const waiting = &follower->waiting;
  const int64_t all = mine->left() - 1;
  for (int64_t begin = 0; begin < all; begin += prefill_chunk_) {
    const int64_t count = std::min(prefill_chunk_, all - begin);
    const auto first = mine->tokens.begin() + mine->computed;
    const Tensor features = Empty({count, info_.kept}, kFloat32);
    std::copy_n(waiting->begin() + begin * info_.kept, count * info_.kept, Data<float>(features));
    Store({SpanOf(*mine, mine->computed, count)}, {first, first + count}, device_.Put(features));
    mine->computed += count;
  }
  waiting->erase(waiting->begin(), waiting->end() - info_.kept);
}

void DraftHead::Store(const std::vector<Span>& spans, const std::vector<int32_t>& tokens, const Tensor& features) {
  prompt_(device_.Put(tokens_data_.Fill(tokens)), features, device_.Put(buffer_.Fill(spans.data(), spans.size())), pages_,
          weights_->all());
}

// Leaves the logits after the last token of each; stores entries of the waiting rows.
void DraftHead::GuessFirst(const std::vector<Drafted>& drafts) {
  std::vector<Span> spans;
  std::vector<int32_t> tokens, last;
  std::vector<float> waiting;
  for (const Drafted& one : drafts) {
    const Sequence& mine = one.follower->mine;
    spans.push_back(SpanOf(mine, mine.computed, mine.left()));
    tokens.insert(tokens.end(), mine.tokens.begin() + mine.computed, mine.tokens.end());
    waiting.insert(waiting.end(), one.follower->waiting.begin(), one.follower->waiting.end());
    last.push_back(static_cast<int32_t>(tokens.size()) - 1);
  }
  const Tensor features = Empty({static_cast<int64_t>(tokens.size()), info_.kept}, kFloat32);
  std::copy(waiting.begin(), waiting.end(), Data<float>(features));
  SetRows(out_, static_cast<int64_t>(drafts.size()));
  SetRows(logits_, static_cast<int64_t>(drafts.size()));
  first_(device_.Put(tokens_data_.Fill(tokens)), device_.Put(features), device_.Put(rows_data_.Fill(last)), out_,
         device_.Put(buffer_.Fill(spans.data(), spans.size())), logits_, pages_, weights_->all());
  for (const Drafted& one : drafts) {
    one.follower->mine.computed = one.follower->mine.length();
    one.follower->waiting.clear();
  }
}

// Leaves the logits after the last token of each draft.
void DraftHead::GuessNext(const std::vector<Drafted>& drafts) {
  std::vector<Span> spans;
  std::vector<int32_t> tokens;
  for (const Drafted& one : drafts) {
    const auto drafted = static_cast<int64_t>(one.tokens.size());
    spans.push_back(SpanOf(one.follower->mine, one.follower->mine.computed + drafted - 1, 1));
    tokens.push_back(one.tokens[one.tokens.size() - 1]);
  }
  next_(device_.Put(tokens_data_.Fill(tokens)), out_, device_.Put(buffer_.Fill(spans.data(), spans.size())), logits_, pages_,
        weights_->all());
}

}  // namespace mlcpipe::serving
