#include "engine.h"

#include <tvm/runtime/memory/memory_manager.h>

#include <chrono>

#include "bundle/weights.h"
#include "pool.h"
#include "workspace.h"

#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace mlcpipe {
namespace {

constexpr int64_t kMinContext = 512;
constexpr int kMaxThreads = 1024;

using Clock = std::chrono::steady_clock;

double Seconds(Clock::time_point began) { return std::chrono::duration<double>(Clock::now() - began).count(); }

// Memory that the virtual machines do not use now goes back to the system.
void ReleasePools() {
  tvm::runtime::memory::MemoryManager::Clear();
#if defined(__GLIBC__)
  malloc_trim(0);
#endif
}

}  // namespace

Plan::Plan(const Manifest& manifest, int64_t wanted)
    : weights_bytes(manifest.plan.weights_bytes),
      workspace_bytes(manifest.running_bytes()),
      free(FindFreeMemory()) {
  const int64_t limit = manifest.model.context_length, token = manifest.plan.kv_bytes_per_token;
  if (wanted < 0 || wanted > limit) {
    throw Error(Code::kUsage, "context length")
        .Expected("1 to " + std::to_string(limit) + " tokens, as compiled")
        .Found(std::to_string(wanted));
  }
  const int64_t room = std::max<int64_t>(0, free.bytes - weights_bytes - workspace_bytes);
  const int64_t fits = std::max(std::min(limit, kMinContext), room / 2 / token);
  context_length = wanted ? wanted : std::min(limit, fits);
  kv_bytes = context_length * token;
}

void Plan::CheckFits() const {
  if (Fits()) return;
  throw Error(Code::kResource, "not enough memory for " + std::to_string(context_length) + " tokens of context")
      .Expected(SizeWords(weights_bytes + workspace_bytes + kv_bytes) + " free: weights " + SizeWords(weights_bytes) +
                ", KV cache " + SizeWords(kv_bytes) + ", workspace " + SizeWords(workspace_bytes))
      .Found(SizeWords(free.bytes) + " free" + (free.limit.empty() ? "" : " within " + free.limit))
      .Next("use a shorter context, a smaller model or a quantization with fewer bits");
}

class Engine::Turn {
 public:
  explicit Turn(Engine* engine) : engine_(engine) {
    if (engine->busy_.exchange(true)) {
      throw Error(Code::kUsage, "the engine is in use").Next("open an engine for each thread, or take turns");
    }
  }
  ~Turn() { engine_->busy_ = false; }

 private:
  Engine* engine_;
};

Engine::Engine(std::unique_ptr<const Files> files, const Options& options)
    : files_(std::move(files)),
      manifest_(*files_),
      variant_(ChooseVariant(manifest_, options.variant).name),
      plan_(manifest_, options.context_length) {
  const auto began = Clock::now();
  plan_.CheckFits();
  const WeightIndex index(manifest_);
  manifest_.Verify(index.shards());
  library_.emplace(manifest_, variant_, options.code ? options.code : ProgramCode());
  model_.emplace(manifest_, *library_, index.Map(), plan_.context_length, &cancelled_);
  SetThreads(options.threads ? options.threads : DefaultThreads());
  statistics_.load_s = Seconds(began);
}

Engine::~Engine() {
  model_.reset();
  library_.reset();
  ReleasePools();
}

void SetThreads(int threads) {
  if (threads < 1 || threads > kMaxThreads) {
    throw Error(Code::kUsage, "threads")
        .Expected("an integer from 1 to " + std::to_string(kMaxThreads))
        .Found(std::to_string(threads));
  }
  mlcpipe_pool_threads(threads);
}

void Engine::Reset() {
  const Turn turn(this);
  model_->Reset();
}

void Engine::Save(const std::string& path, std::string_view chat) {
  const Turn turn(this);
  model_->Save(path, chat);
}

void Engine::Restore(const std::string& path, const std::function<void(std::string_view)>& on_chat) {
  const Turn turn(this);
  model_->Restore(path, on_chat);
}

void Engine::Trim() {
  const Turn turn(this);
  model_->Trim();
  TrimWorkspaces();
  ReleasePools();
}

void Engine::AllLogits(const std::vector<int32_t>& tokens, float* logits) {
  const Turn turn(this);
  __atomic_store_n(&cancelled_, 0, __ATOMIC_RELAXED);
  model_->AllLogits(tokens, logits);
  ReleasePools();  // which would keep logits of every number of tokens
}

const BundleText& Engine::text() {
  std::call_once(text_once_, [this] { text_.emplace(*files_); });
  return *text_;
}

Finish Engine::Generate(const std::function<Request()>& make, const std::function<Verdict(int32_t)>& on_token) {
  const Turn turn(this);
  __atomic_store_n(&cancelled_, 0, __ATOMIC_RELAXED);
  const Request request = make();
  const auto length = static_cast<int64_t>(request.prompt.size());
  model_->CheckFits(length + 1);
  model_->CheckIds(request.prompt);
  request.sampling.Check(manifest_.model.vocab_size);
  if (request.max_tokens < 0) throw Error(Code::kUsage, "max_tokens").Expected("an integer from 1");
  const int64_t room = plan_.context_length - length;
  const int64_t max_tokens = request.max_tokens ? std::min(request.max_tokens, room) : room;
  Sampler sampler(*library_, manifest_.model.vocab_size, request.sampling, request.prompt);
  statistics_ = {length, model_->Reusable(request.prompt), 0, 0, statistics_.load_s, 0, 0};
  auto began = Clock::now();
  int32_t token = model_->Prefill(request.prompt, &sampler);
  statistics_.prefill_s = Seconds(began);
  for (;;) {
    const bool last = ++statistics_.completion_tokens == max_tokens;
    const Verdict verdict = on_token(token);
    if (verdict == Verdict::kStop || request.stop_ids.count(token)) return Finish::kStop;
    if (last) return Finish::kLength;
    if (verdict == Verdict::kCancel || __atomic_load_n(&cancelled_, __ATOMIC_RELAXED)) {
      throw Error(Code::kCancelled, "the answer was cancelled");
    }
    began = Clock::now();
    token = model_->Append(token, &sampler);
    statistics_.decode_s += Seconds(began);
    statistics_.decode_bytes += manifest_.plan.decode_weights_bytes + model_->length() * manifest_.plan.kv_bytes_per_token;
  }
}

}  // namespace mlcpipe
