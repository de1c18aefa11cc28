// One bundle, one answer at a time.
#ifndef MLCPIPE_RUNTIME_ENGINE_H_
#define MLCPIPE_RUNTIME_ENGINE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "model.h"
#include "plan.h"
#include "text/bundle_text.h"

namespace mlcpipe {

struct Statistics {
  int64_t prompt_tokens = 0, cached_tokens = 0, completion_tokens = 0, decode_bytes = 0;
  double load_s = 0, prefill_s = 0, decode_s = 0;
};

struct Request {
  std::vector<int32_t> prompt;
  int64_t max_tokens = 0;  // 0: what the context has room for
  std::set<int32_t> stop_ids;
  Sampling sampling;
};

// Sets the threads of all engines of the process. Throws kUsage.
void SetThreads(int threads);

enum class Finish { kStop = 1, kLength };

// What becomes of an answer after a token.
enum class Verdict { kGoOn, kStop, kCancel };

class Engine {
 public:
  struct Options {
    std::string variant;         // "": the best that this machine can run
    int64_t context_length = 0;  // 0: what fits
    int threads = 0;             // 0: the physical cores
    const mlcpipe_symbol* code = nullptr;  // of a static library; null: the program's, else the bundle's
  };

  // Throws kBundle, kTarget, kResource, kUsage.
  Engine(std::unique_ptr<const Files> files, const Options& options);
  ~Engine();

  // Answers what `make` gives, which is called when nobody else can use the engine and a cancel counts for this call.
  // Calls `on_token` with each token of the answer, the one that ended it too. Where it gives kCancel, and after
  // `Cancel`, throws kCancelled. The pages keep what was computed, so a prompt that begins like an earlier one takes less.
  Finish Generate(const std::function<Request()>& make, const std::function<Verdict(int32_t)>& on_token,
                  Statistics* statistics);

  // Logits f32[n, V].
  void AllLogits(const std::vector<int32_t>& tokens, float* logits);

  // As `Model::Save` and `Model::Restore`.
  void Save(const std::string& path, std::string_view chat);
  void Restore(const std::string& path, const std::function<void(std::string_view)>& on_chat);

  // Ends a call that is under way, from any thread.
  void Cancel() { __atomic_store_n(&cancelled_, 1, __ATOMIC_RELAXED); }
  // The same for the call that is under way and those that begin later.
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

 private:
  // One call at a time; others throw kUsage instead of waiting.
  class Turn;

  const std::unique_ptr<const Files> files_;
  const Manifest manifest_;
  const std::string variant_;
  const Plan plan_;
  int cancelled_ = 0;
  std::atomic<bool> busy_{false}, closed_{false};
  std::optional<Library> library_;
  std::optional<Model> model_;
  std::once_flag text_once_;
  std::optional<const BundleText> text_;
  double load_s_ = 0;

  // Makes what was cancelled before no matter for the call that begins. Throws kCancelled for an engine that was closed.
  void Begin();
};

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_ENGINE_H_
