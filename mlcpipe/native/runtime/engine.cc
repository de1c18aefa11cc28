#include "engine.h"

#include <tvm/runtime/memory/memory_manager.h>

#include <unordered_set>

#include "bundle/weights.h"
#include "pool.h"
#include "serving/message_borders.h"
#include "workspace.h"

#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace mlcpipe {
namespace {

constexpr int kMaxThreads = 1024;
constexpr double kMaxTimeoutS = 1e9;

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

Device ChooseDevice(const Manifest& manifest, const std::string& wanted, const std::string& cache) {
  const std::string& kind = manifest.variants.front().kind;
  if (!wanted.empty() && !IsKind(wanted) && wanted != "auto") {
    throw Error(Code::kUsage, "device").Expected(Kinds() + " or auto").Found(wanted);
  }
  if (wanted.empty() || wanted == "auto" || wanted == kind) return FindDevice(kind, cache);
  throw Error(Code::kTarget, "the bundle was made for another kind of device")
      .Where(manifest.source.where())
      .Expected("code for " + wanted)
      .Found("code for " + kind)
      .Next("compile the model with --target " + wanted);
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
      device_(ChooseDevice(manifest_, options.device, options.cache)),
      variant_(ChooseVariant(manifest_, options.variant).name),
      plan_(manifest_, ChooseVariant(manifest_, variant_), options, device_.Free()) {
  if (!options.draft.empty() && options.draft != "off" && (options.draft != "lookup" || !options.sequences)) {
    throw Error(Code::kUsage, "draft").Expected("off, or lookup with several sequences").Found(options.draft);
  }
  plan_.CheckFits();
  const WeightIndex index(manifest_);
  manifest_.Verify(index.shards());
  library_.emplace(manifest_, variant_, options.code ? options.code : ProgramCode(), device_);
  prepared_.emplace(device_, library_->module(), options.cache);
  TokenTables weights(manifest_, device_, index.Map());
  if (options.sequences) {
    batch_.emplace(manifest_, device_, *library_, std::move(weights), plan_, options, &cancelled_);
  } else {
    model_.emplace(manifest_, device_, *library_, std::move(weights), plan_, &cancelled_);
  }
  SetThreads(options.threads ? options.threads : DefaultThreads(), options.threads || !device_.on_host());
  load_s_ = Seconds(began_);
}

Engine::~Engine() {
  model_.reset();
  batch_.reset();
  prepared_.reset();
  library_.reset();
  ReleasePools();
}

void SetThreads(int threads, bool fixed) {
  if (threads < 1 || threads > kMaxThreads) {
    throw Error(Code::kUsage, "threads")
        .Expected("an integer from 1 to " + std::to_string(kMaxThreads))
        .Found(std::to_string(threads));
  }
  mlcpipe_pool_threads(threads, fixed);
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

Model& Engine::model() {
  if (model_) return *model_;
  throw Error(Code::kUsage, "the engine was opened for several answers at once").Next("open one without sequences");
}

serving::Batch& Engine::batch() {
  if (batch_) return *batch_;
  throw Error(Code::kUsage, "the engine was opened for one answer at a time").Next("open one with sequences");
}

uint64_t Engine::Submit(const Request& request, std::function<Verdict(int32_t)> on_token,
                        std::function<void(const Statistics&, std::optional<Finish>, const Error*)> on_end) {
  const int64_t length = static_cast<int64_t>(request.prompt.size()), context = plan_.context_length;
  CheckIds(request.prompt, manifest_.model.vocab_size);
  request.sampling.Check(manifest_.model.vocab_size);
  if (request.max_tokens < 0) throw Error(Code::kUsage, "max_tokens").Expected("an integer from 1");
  if (!(request.timeout_s >= 0 && request.timeout_s <= kMaxTimeoutS)) {
    throw Error(Code::kUsage, "timeout_s").Expected("0 to 1e9 seconds").Found(std::to_string(request.timeout_s));
  }
  if (std::abs(request.priority) > 1) {
    throw Error(Code::kUsage, "priority").Expected("-1, 0 or 1").Found(std::to_string(request.priority));
  }
  serving::Client client{{}, request.sampling, {}, std::move(on_token), std::move(on_end)};
  client.request.tokens = request.prompt;
  client.request.max_tokens = request.max_tokens ? request.max_tokens : std::max<int64_t>(1, context - length);
  client.request.stop_ids = request.stop_ids;
  client.request.borders = BordersOf(request.prompt);
  client.request.deterministic = request.deterministic;
  client.request.priority = request.priority;
  if (request.timeout_s > 0) client.timeout_s = request.timeout_s;
  return batch().Submit(std::move(client));
}

size_t Engine::Step() {
  const Turn turn(this);
  Begin();
  return batch().Step();
}

void Engine::Reset() {
  const Turn turn(this);
  model().Reset();
}

void Engine::Save(const std::string& path, std::string_view chat) {
  const Turn turn(this);
  model().Mend();
  model_->Save(path, chat);
}

void Engine::Restore(const std::string& path, const std::function<void(std::string_view)>& on_chat) {
  const Turn turn(this);
  model().Restore(path, on_chat);
}

void Engine::Trim() {
  const Turn turn(this);
  if (model_) model_->Trim();
  TrimWorkspaces();
  ReleasePools();
  device_.Trim();
}

void Engine::AllLogits(const std::vector<int32_t>& tokens, float* logits) {
  const Turn turn(this);
  Begin();
  model().AllLogits(tokens, logits);
  ReleasePools();  // which would keep logits of every number of tokens
}

const BundleText& Engine::text() {
  std::call_once(text_once_, [this] { text_.emplace(*files_); });
  return *text_;
}

std::vector<int64_t> Engine::BordersOf(const std::vector<int32_t>& prompt) {
  if (!plan_.units.slots || !BundleText::In(*files_)) return {};
  const View<uint32_t>& control = text().tokenizer().tables().control;
  const std::unordered_set<uint32_t> known(control.begin(), control.end());
  std::vector<int64_t> places;
  for (size_t at = 0; at < prompt.size(); ++at) {
    if (known.count(static_cast<uint32_t>(prompt[at]))) places.push_back(static_cast<int64_t>(at));
  }
  return serving::PageBorders(static_cast<int64_t>(prompt.size()), std::move(places));
}

Finish Engine::Generate(const std::function<Request()>& make, const std::function<Verdict(int32_t)>& on_token,
                        Statistics* statistics) {
  const Turn turn(this);
  model().Mend();
  Begin();
  const Request request = make();
  const auto length = static_cast<int64_t>(request.prompt.size());
  model_->CheckFits(length + 1);
  CheckIds(request.prompt, manifest_.model.vocab_size);
  request.sampling.Check(manifest_.model.vocab_size);
  if (request.max_tokens < 0) throw Error(Code::kUsage, "max_tokens").Expected("an integer from 1");
  if (request.priority != 0 || request.timeout_s != 0) {
    throw Error(Code::kUsage, "priority and timeout_s").Expected("0 for an engine that answers one at a time");
  }
  const int64_t room = plan_.context_length - length;
  const int64_t max_tokens = request.max_tokens ? std::min(request.max_tokens, room) : room;
  Row row(manifest_.model.vocab_size, request.sampling, request.prompt);
  *statistics = {};
  statistics->prompt_tokens = length;
  statistics->load_s = load_s_;
  std::tie(statistics->cached_tokens, statistics->miss) = model_->Reusable(request.prompt);
  auto began = Clock::now();
  int32_t token = model_->Prefill(request.prompt, &row, BordersOf(request.prompt));
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
    token = model_->Append(token, &row);
    statistics->decode_s += Seconds(began);
    statistics->decode_bytes += manifest_.DecodeBytes(model_->length());
  }
}

}  // namespace mlcpipe
