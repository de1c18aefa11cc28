// Drafts by the head of a bundle, whose one layer has a KV cache of its own (mlcpipe/runtime/serving/eagle.py).
#ifndef MLCPIPE_RUNTIME_SERVING_DRAFT_HEAD_H_
#define MLCPIPE_RUNTIME_SERVING_DRAFT_HEAD_H_

#include <tvm/ffi/container/array.h>

#include <functional>
#include <map>
#include <vector>

#include "library.h"
#include "plan.h"
#include "sampler.h"
#include "serving/scheduler.h"
#include "step.h"
#include "token_tables.h"

namespace mlcpipe::serving {

// Rows of a sequence that a forward kept: `size` of them from `row` on, for its tokens from `position` on.
struct KeptRows {
  SequencePointer sequence;
  int64_t row, position, size;
};

// How the tokens of a sequence are drawn; null for one that has ended.
using RowOf = std::function<Row*(const Sequence&)>;

class DraftHead {
 public:
  // With pages for `kv_tokens` tokens; steps have at most `rows` rows of so many answers.
  DraftHead(const Manifest& manifest, const Device& device, const Library& library, int64_t kv_tokens, int64_t rows,
            int64_t sequences);

  // The scheduler's running sequences get drafts where that pays. Once that has failed they get none.
  void Propose(Scheduler* scheduler, const RowOf& row_of, const TokenTables& weights);

  // Nothing is drafted any more, and nothing kept.
  void GiveUp();

  // What the model's forwards keep, f32[rows, kept], of answers and of prompts.
  tvm::runtime::Tensor hidden, hidden_of_prompts;
  // A forward of answers, or of prompts, is about to keep these rows.
  void KeepOfAnswer(KeptRows rows) { Keep(&rows_, std::move(rows)); }
  void KeepOfPrompt(KeptRows rows) { Keep(&prompt_rows_, std::move(rows)); }

 private:
  // The head's sequence for an answer. Its token i is the answer's at i + 1 + `offset`: some entries may be missing.
  struct Follower {
    Follower(SequencePointer answer, int64_t id, Request request)
        : answer(std::move(answer)), mine(id, std::move(request), 1) {}

    SequencePointer answer;
    Sequence mine;
    int64_t offset = 0;
    std::vector<float> waiting;  // hidden rows [n, kept] of its last tokens, which have no entries yet

    // The position in the answer of the next entry.
    int64_t end() const { return mine.length() + offset; }
  };
  struct Drafted {
    Follower* follower;
    Row* row;
    FewTokens tokens;
  };

  const Device& device_;
  const DraftHeadInfo info_;
  const int64_t vocab_, prefill_chunk_;
  tvm::ffi::Function prompt_, first_, next_;
  PagePool pool_;
  PrefixTree tree_;
  tvm::ffi::Array<tvm::runtime::Tensor> pages_;
  tvm::runtime::Tensor out_, logits_;  // f32[sequences, hidden size], f32[sequences, vocabulary]
  Sampler sampler_;
  StepBuffer buffer_;
  Numbers tokens_data_, rows_data_;
  std::map<int64_t, Follower> followers_;       // by the id of the answer
  std::vector<KeptRows> rows_, prompt_rows_;    // since the last `Propose`
  const TokenTables* weights_ = nullptr;   // of the present call
  CostModel cost_;
  double rate_ = 0.5;  // how often its drafts were accepted lately; an answer starts with it
  int64_t next_id_ = 0, rounds_ = 0, without_ = 0;
  Search following_;  // whether keeping up with answers pays
  bool failed_ = false;

  void Keep(std::vector<KeptRows>* to, KeptRows rows) {
    if (!failed_) to->push_back(std::move(rows));
  }
  bool Follows(Sequence* sequence);
  std::vector<KeptRows> Followed(std::vector<KeptRows> kept);
  void FollowPrompts(const std::vector<KeptRows>& kept);
  void FollowAnswers(const std::vector<KeptRows>& kept);
  std::pair<Follower*, int64_t> Follow(const SequencePointer& sequence, int64_t begin, int64_t rows);
  void Release(int64_t id);
  void MakeFindable(Follower* follower);
  bool Reserve(Sequence* mine, int64_t end);
  int64_t Length(Scheduler* scheduler, const std::vector<double>& rates);
  void Draft(const std::vector<SequencePointer>& answers, int64_t length, int64_t context, const RowOf& row_of);
  void CatchUp(Follower* follower);
  void Store(const std::vector<Span>& spans, const std::vector<int32_t>& tokens, const tvm::runtime::Tensor& features);
  void GuessFirst(const std::vector<Drafted>& drafts);
  void GuessNext(const std::vector<Drafted>& drafts);
};

}  // namespace mlcpipe::serving

#endif  // MLCPIPE_RUNTIME_SERVING_DRAFT_HEAD_H_
