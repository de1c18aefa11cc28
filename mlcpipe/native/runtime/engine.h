// One bundle: one answer at a time, or several.
#ifndef MLCPIPE_RUNTIME_ENGINE_H_
#define MLCPIPE_RUNTIME_ENGINE_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "answer_types.h"
#include "device.h"
#include "model.h"
#include "plan.h"
#include "serving/batch.h"
#include "text/bundle_text.h"

namespace mlcpipe {

struct Request {
  std::vector<int32_t> prompt;
  int64_t max_tokens = 0;  // 0: what the context has room for
  std::set<int32_t> stop_ids;
  Sampling sampling;
  bool deterministic = false;  // of several: takes only keys that were computed as this request would compute them
  int priority = 0;            // of several, -1 to 1: the higher goes first
  double timeout_s = 0;        // of several: from `Submit` to the end; 0: none
};

// Sets the threads of all engines of the process; unless `fixed`, decode steps may take fewer. Throws kUsage.
void SetThreads(int threads, bool fixed);

// The device for the code of a bundle. Throws kTarget where that is for another than `wanted`, kUsage for a word that is
// none.
Device ChooseDevice(const Manifest& manifest, const std::string& wanted, const std::string& cache);

class Engine {
 public:
  using Options = mlcpipe::Options;

  // Throws kBundle, kTarget, kResource, kUsage.
  Engine(std::unique_ptr<const Files> files, const Options& options);
  ~Engine();

  // Answers what `make` gives, which is called when no other call can use the engine and a cancel counts for this call.
  // Calls `on_token` with each token of the answer, the one that ended it too. Where it gives kCancel, and after
  // `Cancel`, throws kCancelled. The pages keep what was computed, so a prompt that begins like an earlier one takes less.
  Finish Generate(const std::function<Request()>& make, const std::function<Verdict(int32_t)>& on_token,
                  Statistics* statistics);

  // For an engine of several sequences, from any thread: the answer begins at the next `Step`, which calls both functions.
  // As `Generate` and `serving::Client` describe them. Returns the answer's number.
  uint64_t Submit(const Request& request, std::function<Verdict(int32_t)> on_token,
                  std::function<void(const Statistics&, std::optional<Finish>, const Error*)> on_end);
  // Ends an answer with kCancelled at the next step, from any thread.
  void CancelAnswer(uint64_t number) { batch().Cancel(number); }
  // Computes what is next of all answers. Returns how many have not ended.
  size_t Step();

  // Logits f32[n, V].
  void AllLogits(const std::vector<int32_t>& tokens, float* logits);

  // As `Model::Save` and `Model::Restore`.
  void Save(const std::string& path, std::string_view chat);
  void Restore(const std::string& path, const std::function<void(std::string_view)>& on_chat);

  // Ends the running call, from any thread.
  void Cancel() {
    model();
    __atomic_store_n(&cancelled_, 1, __ATOMIC_RELAXED);
  }
  // The same for the running call and those that begin later.
  void Close();

  void Reset();

  // Gives memory back that no sequence needs.
  void Trim();

  // Tokenizer and template, mapped at the first call. Throws kTokenizer or kTemplate for a bundle whose files are
  // missing or damaged.
  const BundleText& text();

  const Plan& plan() const { return plan_; }
  const Manifest& manifest() const { return manifest_; }
  const std::string& variant() const { return variant_; }
  const Device& device() const { return device_; }

 private:
  // One call at a time; others throw kUsage instead of waiting.
  class Turn;

  const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
  const std::unique_ptr<const Files> files_;
  const Manifest manifest_;
  const Device device_;
  const std::string variant_;
  const Plan plan_;
  int cancelled_ = 0;
  std::atomic<bool> busy_{false}, closed_{false};
  std::optional<Library> library_;
  std::optional<Prepared> prepared_;
  std::optional<Model> model_;
  std::optional<serving::Batch> batch_;
  std::once_flag text_once_;
  std::optional<const BundleText> text_;
  double load_s_ = 0;

  // Throw kUsage for an engine that was opened for the other.
  Model& model();
  serving::Batch& batch();
  // Where the states of a prompt are kept. Throws as `text`.
  std::vector<int64_t> BordersOf(const std::vector<int32_t>& prompt);
  // Makes what was cancelled before no matter for the call that begins. Throws kCancelled for an engine that was closed.
  void Begin();
};

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_ENGINE_H_
