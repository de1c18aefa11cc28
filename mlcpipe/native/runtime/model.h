// A loaded bundle with sequences in its pages and slots.
#ifndef MLCPIPE_RUNTIME_MODEL_H_
#define MLCPIPE_RUNTIME_MODEL_H_

#include <tvm/ffi/container/array.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "chat_file.h"
#include "device.h"
#include "library.h"
#include "plan.h"
#include "pool.h"
#include "sampler.h"
#include "serving/prefix_tree.h"
#include "step.h"
#include "token_tables.h"

namespace mlcpipe {

// Memory for the states of a model, in the order of its table.
tvm::ffi::Array<tvm::runtime::Tensor> MakeStates(const StateTable& table, const Device& device, const Units& units);

// Copies a page of each state of a group.
void CopyPage(const StateTable& table, const tvm::ffi::Array<tvm::runtime::Tensor>& states, const serving::PageCopy& copy);

std::vector<serving::PageGroup> GroupsOf(const StateTable& table, const Units& units);

// The next rows of a sequence that has pages and slots for them.
inline Span SpanOf(const serving::Sequence& sequence, int64_t begin, int64_t rows) {
  return {begin, rows, sequence.decode_from, sequence.tables.data(), sequence.slot, sequence.next_slot,
          &sequence.row_slots};
}

// Throws kUsage for no tokens, and for ids outside the vocabulary.
void CheckIds(const std::vector<int32_t>& tokens, int64_t vocab);

// One conversation, and what the tree has of those before it. An error half way leaves the tokens before; std::bad_alloc leaves
// what only `Mend` makes usable.
class Model {
 public:
  // Takes the memory that was planned. A forward ends with kCancelled soon after `*cancelled` is not 0.
  Model(const Manifest& manifest, const Device& device, const Library& library,
        TokenTables weights, const Plan& plan, const int* cancelled);

  // Makes `tokens` the current sequence, computing only what the pages lack. Returns the next token. Throws kUsage for ids
  // outside the vocabulary and when the context is full, kCompute where logits are not finite, kCancelled.
  int32_t Prefill(const std::vector<int32_t>& tokens, Row* drawn, const std::vector<int64_t>& borders);

  // Appends one token of the vocabulary to the current sequence. Returns the next one. Throws what `Prefill` throws.
  int32_t Append(int32_t token, Row* drawn);

  // Logits f32[n, V] after each of n tokens of a new sequence. All sequences are forgotten.
  void AllLogits(const std::vector<int32_t>& tokens, float* logits);

  // How many tokens at the start are computed already, and why no more; never all, as the last one gives the logits.
  std::pair<int64_t, serving::CacheMiss> Reusable(const std::vector<int32_t>& tokens) const;

  void CheckFits(int64_t count) const;

  // Writes the current sequence and `chat` to a file (chat_file.h). Throws as `WriteChat`.
  void Save(const std::string& path, std::string_view chat) const;

  // Makes a chat that was saved the current sequence, and forgets all others. `on_chat` gets its text once all is checked. A
  // file that is refused, which throws kUsage, changes nothing, nor does a call where `on_chat` throws.
  void Restore(const std::string& path, const std::function<void(std::string_view)>& on_chat);

  // Forgets all sequences.
  void Reset();
  // Forgets them where a call had no memory: its changes were half made. To be called before all but `Reset`.
  void Mend();
  // Gives back the memory of what no sequence has; of a device's, where none has any.
  void Trim();
  int64_t length() const { return now_->computed; }

 private:
  const Manifest& manifest_;
  const Device& device_;
  const Plan& plan_;
  tvm::ffi::Function decode_, prefill_;
  TokenTables weights_;
  tvm::ffi::Array<tvm::runtime::Tensor> states_;
  const int* cancelled_;
  mlcpipe_step_threads step_threads_[MLCPIPE_ROW_CLASSES] = {};
  std::optional<serving::PagePool> pool_;
  std::optional<serving::PrefixTree> tree_;
  serving::SequencePointer now_;
  bool broken_ = false;
  Sampler sampler_;
  StepBuffer step_;
  tvm::runtime::Tensor id_, decode_logits_, prefill_logits_;
  Reused id_on_device_, step_on_device_;

  // A sequence of which nothing is computed.
  serving::SequencePointer Begun(std::vector<int32_t> tokens) const;
  // Tokens that a sequence could take over from the one before it, to the token.
  int64_t SharedWith(const serving::Sequence& previous, const serving::Sequence& sequence) const;
  // Of a file without tokens.
  ChatHeader Header() const;
  std::vector<int32_t> SavedUnits(const State& state) const;
  // Computes the current sequence's next rows by `launch`, which gets their step i32[k].
  void Compute(int64_t rows, const std::function<void(const tvm::runtime::Tensor&)>& launch);
  // The current sequence's next `count` tokens with the arithmetic of prompts; logits of the rows that are named.
  void ComputePrompt(int64_t count, const tvm::runtime::Tensor& rows, const tvm::runtime::Tensor& logits);
  int32_t Decode(int32_t token, Row* drawn);
  int32_t Draw(const tvm::runtime::Tensor& logits, Row* drawn);
  // Throws kCancelled where the call was cancelled.
  void CheckCancelled() const;
  // Error of a forward.
  Error Failed(const tvm::ffi::Error& error) const;
};

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_MODEL_H_
