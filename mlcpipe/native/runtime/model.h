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
#include "sampler.h"
#include "sequences.h"
#include "step.h"

namespace mlcpipe {

// Memory for the states of a model, in the order of its table.
tvm::ffi::Array<tvm::runtime::Tensor> MakeStates(const StateTable& table, const Device& device, const Units& units);

// Copies a page of each state of a group, or of all.
void CopyPage(const StateTable& table, const tvm::ffi::Array<tvm::runtime::Tensor>& states, std::optional<size_t> group,
              int32_t from, int32_t to);

// Throws kUsage for no tokens, and for ids outside the vocabulary.
void CheckIds(const std::vector<int32_t>& tokens, int64_t vocab);

// Which tokens are computed, and the steps that add to them. What the pages hold beyond a sequence's length is never read,
// so an error half way leaves the tokens before.
class Model {
 public:
  // Takes the memory that was planned. A forward ends with kCancelled soon after `*cancelled` is not 0.
  Model(const Manifest& manifest, const Device& device, const Library& library,
        tvm::ffi::Array<tvm::runtime::Tensor> params, const Plan& plan, const int* cancelled);

  // Makes `tokens` the current sequence, computing only what the pages lack. Returns the next token. Throws kUsage for ids
  // outside the vocabulary and when the context is full, kCompute where logits are not finite, kCancelled.
  int32_t Prefill(const std::vector<int32_t>& tokens, Row* drawn);

  // Appends one token of the vocabulary to the current sequence. Returns the next one. Throws what `Prefill` throws.
  int32_t Append(int32_t token, Row* drawn);

  // Logits f32[n, V] after each of n tokens of a new sequence. All sequences are forgotten.
  void AllLogits(const std::vector<int32_t>& tokens, float* logits);

  // How many tokens at the start are computed already; never all, as the last one gives the logits.
  int64_t Reusable(const std::vector<int32_t>& tokens) const { return Nearest(tokens).length; }

  void CheckFits(int64_t count) const;

  // Writes the current sequence and `chat` to a file (chat_file.h). Throws as `WriteChat`.
  void Save(const std::string& path, std::string_view chat) const;

  // Makes a chat that was saved the current sequence. `on_chat` gets its text once all is checked. A file that is refused, which
  // throws kUsage, changes nothing, nor does a call where `on_chat` throws.
  void Restore(const std::string& path, const std::function<void(std::string_view)>& on_chat);

  // Forgets all sequences.
  void Reset() { sequences_.Clear(); }
  // Gives back the memory of what no sequence has; of a device's, where none has any.
  void Trim();
  int64_t length() const { return sequences_.current().length; }

 private:
  const Manifest& manifest_;
  const Device& device_;
  const Plan& plan_;
  tvm::ffi::Function decode_, prefill_;
  tvm::ffi::Array<tvm::runtime::Tensor> params_, states_;
  const int* cancelled_;
  Sequences sequences_;
  Sampler sampler_;
  StepBuffer step_;
  tvm::runtime::Tensor id_, decode_logits_, prefill_logits_;
  Reused id_on_device_, step_on_device_;

  struct Prefix {
    const Sequence* of = nullptr;
    int64_t length = 0;
  };

  int64_t RopeOf(int64_t length) const;
  // Of a file without tokens.
  ChatHeader Header() const;
  std::vector<int32_t> SavedUnits(const State& state) const;
  // The longest that a sequence begins with; none: length 0.
  Prefix Nearest(const std::vector<int32_t>& tokens) const;
  // Makes `tokens` the current sequence, with what is computed of a prefix.
  Sequence& Begin(const std::vector<int32_t>& tokens, const Prefix& prefix);
  // The current sequence's next `count` tokens with the arithmetic of prompts; logits of the rows that are named.
  void ComputePrompt(int64_t count, const tvm::runtime::Tensor& rows, const tvm::runtime::Tensor& logits);
  int32_t Decode(int32_t token, Row* drawn);
  // The step i32[k] of the current sequence's next rows.
  const tvm::runtime::Tensor& FillStep(int64_t rows);
  int32_t Draw(const tvm::runtime::Tensor& logits, Row* drawn);
  // Throws kCancelled where the call was cancelled.
  void CheckCancelled() const;
  // Error of a forward, whose rows are not computed.
  Error Failed(const tvm::ffi::Error& error);
};

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_MODEL_H_
