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
  load_s_ = Seconds(began);
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

// A call may begin while another thread closes the engine: then one of both sees what the other wrote.
void Engine::Begin() {
  __atomic_store_n(&cancelled_, 0, __ATOMIC_SEQ_CST);
  if (closed_) throw Error(Code::kCancelled, "the engine was closed");
}

void Engine::Close() {
  closed_ = true;
  __atomic_store_n(&cancelled_, 1, __ATOMIC_SEQ_CST);
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
  Begin();
  model_->AllLogits(tokens, logits);
  ReleasePools();  // which would keep logits of every number of tokens
}

const BundleText& Engine::text() {
  std::call_once(text_once_, [this] { text_.emplace(*files_); });
  return *text_;
}

Finish Engine::Generate(const std::function<Request()>& make, const std::function<Verdict(int32_t)>& on_token,
                        Statistics* statistics) {
  const Turn turn(this);
  Begin();
  const Request request = make();
  const auto length = static_cast<int64_t>(request.prompt.size());
  model_->CheckFits(length + 1);
  model_->CheckIds(request.prompt);
  request.sampling.Check(manifest_.model.vocab_size);
  if (request.max_tokens < 0) throw Error(Code::kUsage, "max_tokens").Expected("an integer from 1");
  const int64_t room = plan_.context_length - length;
  const int64_t max_tokens = request.max_tokens ? std::min(request.max_tokens, room) : room;
  Sampler sampler(*library_, manifest_.model.vocab_size, request.sampling, request.prompt);
  *statistics = {length, model_->Reusable(request.prompt), 0, 0, load_s_, 0, 0};
  auto began = Clock::now();
  int32_t token = model_->Prefill(request.prompt, &sampler);
  statistics->prefill_s = Seconds(began);
  for (;;) {
    const bool last = ++statistics->completion_tokens == max_tokens;
    const Verdict verdict = on_token(token);
    if (verdict == Verdict::kStop || request.stop_ids.count(token)) return Finish::kStop;
    if (last) return Finish::kLength;
    if (verdict == Verdict::kCancel || __atomic_load_n(&cancelled_, __ATOMIC_RELAXED)) {
      throw Error(Code::kCancelled, "the answer was cancelled");
    }
    began = Clock::now();
    token = model_->Append(token, &sampler);
    statistics->decode_s += Seconds(began);
    statistics->decode_bytes += manifest_.plan.decode_weights_bytes + model_->length() * manifest_.plan.kv_bytes_per_token;
  }
}

}  // namespace mlcpipe
