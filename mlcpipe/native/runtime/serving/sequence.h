// A request, the progress of its answer, and its rows in a step (mlcpipe/runtime/serving/sequence.py).
#ifndef MLCPIPE_RUNTIME_SERVING_SEQUENCE_H_
#define MLCPIPE_RUNTIME_SERVING_SEQUENCE_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "page.h"
#include "serving/drafting.h"

namespace mlcpipe::serving {

constexpr int kMinPriority = -1, kMaxPriority = 1;

// A prompt, and how to continue it. Times are seconds on the clock that the scheduler is called with.
struct Request {
  std::vector<int32_t> tokens;  // one or more
  int64_t max_tokens = 1;       // of the answer
  std::set<int32_t> stop_ids;   // that end the answer; the one that ended it is part of it
  int priority = 0;             // a class that may take pages and places from a lower one
  std::optional<double> deadline_s;
  std::string cache_salt;  // pages are shared by equal ones only
  double arrival = 0;
  bool keep = false;           // the pages of the prompt stay when the answer has ended
  bool deterministic = false;  // takes only pages that were computed with the arithmetic that it would use
  bool redraws = false;        // its rows may be computed again: the slot before them stays
  bool drafts = false;         // tokens that are looked up in its texts are checked several at a time, where that pays
  std::vector<int64_t> borders;  // the ends of pages before which its messages end: serving/message_borders.h
};

// kWaiting has no pages. kPrefilling has tokens to compute before its next one is drawn, kRunning only its last.
enum class State { kWaiting, kPrefilling, kRunning, kEnded };

enum class End { kStop, kLength, kCancelled, kTimeout, kError };

class Node;  // of the prefix tree
struct Sequence;
using SequencePointer = std::shared_ptr<Sequence>;

// A slot that a sequence left in a node of the prefix tree, by the node's number: after `tokens` tokens, the one before it
// after `before`.
struct LeftSlot {
  int64_t node;
  int32_t slot;
  int64_t tokens, before;
};

// Why no more of a prompt was reused than was: `CacheMiss` of mlcpipe/runtime/sampling_params.py.
struct CacheMiss {
  const char* reason = nullptr;  // null: that is all that was computed of it
  int64_t token = -1;            // from 0; -1: none is meant
};

// An admitted or waiting request. `tables` and `kept_from` are by group of pages.
struct Sequence {
  Sequence(int64_t id, Request request, size_t groups)
      : id(id), request(std::move(request)), tokens(this->request.tokens), decode_from(length()), tables(groups),
        kept_from(groups) {
  }

  const int64_t id;
  const Request request;
  std::vector<int32_t> tokens;  // prompt and answer; the last one drawn is not computed yet
  // Tokens before it are computed as prefill rows, the others as decode rows.
  int64_t decode_from;
  std::vector<std::vector<int32_t>> tables;  // the page of each 16 tokens; kNoUnit where a window has left it behind
  std::vector<int64_t> kept_from;            // the first page that has not been left behind
  State state = State::kWaiting;
  int64_t computed = 0;       // tokens whose states are there
  int32_t slot = kNoUnit;       // where the states after them are; before the first, and in models without slots: none
  int32_t next_slot = kNoUnit;  // where the running step writes them,
  std::vector<int32_t> row_slots;  // and those after each row of a draft but the last
  std::optional<Lookup> lookup;
  std::optional<HeadDraft> head;  // of a bundle with a draft head
  FewTokens draft;  // proposed tokens after the last one
  int64_t drafted = 0, accepted = 0;  // tokens of drafts that were checked, and of them those that stood
  std::optional<LeftSlot> checkpoint;  // the last one that this sequence left in the prefix tree
  Node* node = nullptr;  // the deepest of the prefix tree that this sequence uses,
  int64_t shared = 0;    // and how deep it is
  std::optional<int64_t> cached;  // tokens of the prompt that were found when the request was first admitted,
  CacheMiss miss;                 // and why no more
  int preemptions = 0;
  double passed_s = 0;     // how long shorter prompts went before this one, less how long it was served since
  SequencePointer leader;  // computes the beginning of this one, up to `leader_tokens`
  int64_t leader_tokens = 0;
  std::optional<End> end;

  int64_t length() const { return static_cast<int64_t>(tokens.size()); }
  int64_t left() const { return length() - computed; }
  int64_t answer() const { return length() - static_cast<int64_t>(request.tokens.size()); }
  // The order of sequences: higher priority first, then earlier arrival.
  std::tuple<int, double, int64_t> order() const { return {-request.priority, request.arrival, id}; }
  // The length that RoPE's frequencies at this position follow: of the whole prompt, or up to the token.
  int64_t RopeLength(int64_t position) const { return std::max(decode_from, position + 1); }
  // Bit i: token i of this page is computed as a decode row.
  uint32_t DecodeMask(int64_t page) const {
    return 0xFFFFU << std::clamp<int64_t>(decode_from - page * kPage, 0, kPage) & 0xFFFFU;
  }

  // Appends a drawn token; sets `end` where it ends the answer.
  void Push(int32_t token, int64_t context) {
    tokens.push_back(token);
    if (request.stop_ids.count(token)) {
      end = End::kStop;
    } else if (answer() >= request.max_tokens || length() >= context) {
      end = End::kLength;
    }
  }
};

// Rows with decode's arithmetic: the last sampled token and the sequence's draft, or tokens of an answer that is recomputed.
// They follow the computed tokens. The last `logits` of them have logits.
struct DecodeRows {
  SequencePointer sequence;
  int64_t rows, logits;
};

// Rows with prefill's arithmetic, from `begin` on. Where the prompt ends, a token is sampled from the last row for each of
// `drawing`: the sequence, then those that waited with the same prompt and start from its pages.
struct PrefillRows {
  SequencePointer sequence;
  int64_t begin, rows;
  std::vector<SequencePointer> drawing;
};

// To copy before a step's forwards; no target of a step is a source of it.
struct PageCopy {
  int32_t source, target;
  size_t group;
};

// Tokens that a sequence got, or why it ended, or both.
struct Event {
  SequencePointer sequence;
  FewTokens tokens;
  std::optional<End> end;
};

}  // namespace mlcpipe::serving

#endif  // MLCPIPE_RUNTIME_SERVING_SEQUENCE_H_
