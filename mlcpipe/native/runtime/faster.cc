#include "faster.h"

#include <map>
#include <mutex>
#include <optional>

#include "cache_file.h"

namespace mlcpipe {
namespace {

constexpr double kFaster = 1.2;  // a GPU also takes memory and heats the device
constexpr int64_t kPromptTokens = 32, kAnswerTokens = 9;
constexpr char kCpu[] = "cpu", kGpu[] = "gpu";

// The measurements of this process, by the facts that they depend on.
struct Choices {
  std::mutex mutex;
  std::map<std::string, std::string> all;

  static Choices& Global() {
    static auto* const choices = new Choices();
    return *choices;
  }
};

Engine::Options OnGpu(Engine::Options options) {
  options.code = options.gpu_code;
  options.variant.clear();  // of the CPU's code
  return options;
}

// Of a prompt and an answer, the better of two: the first one also loads code.
double Seconds(std::unique_ptr<const Files> files, Engine::Options options) {
  options.sequences = 0;
  options.context_length = kPromptTokens + kAnswerTokens;
  Engine engine(std::move(files), options);
  Request request;
  for (int64_t i = 0; i < kPromptTokens; ++i) {
    request.prompt.push_back(static_cast<int32_t>(i % engine.manifest().model.vocab_size));
  }
  request.sampling.temperature = 0;
  request.max_tokens = kAnswerTokens;
  double best = 0;
  for (int run = 0; run < 2; ++run) {
    engine.Reset();
    Statistics statistics{};
    engine.Generate([&] { return request; }, [](int32_t) { return Verdict::kGoOn; }, &statistics);
    const double seconds = statistics.prefill_s + statistics.decode_s;
    if (!run || seconds < best) best = seconds;
  }
  return best;
}

// kGpu or kCpu. The CPU is the choice until both were measured: a driver that ends the process is not tried again.
std::string Choose(const std::function<std::unique_ptr<const Files>()>& on_cpu, const std::string& gpu_path,
                   const Engine::Options& options, const std::string& key) {
  const CacheFile kept(options.cache, "faster", key);
  auto& [mutex, all] = Choices::Global();
  const std::lock_guard<std::mutex> lock(mutex);
  std::string& choice = all[key];
  if (!choice.empty()) return choice;
  if (const auto content = kept.Read()) return choice = content->rfind(kGpu, 0) == 0 ? kGpu : kCpu;
  kept.Write(kCpu);
  const double cpu_s = Seconds(on_cpu(), options);
  std::optional<double> gpu_s;
  try {
    gpu_s = Seconds(Files::At(gpu_path), OnGpu(options));
  } catch (const Error&) {  // a driver that computes nonsense, or too little memory
  } catch (const tvm::ffi::Error&) {
  }
  choice = gpu_s && cpu_s >= kFaster * *gpu_s ? kGpu : kCpu;
  kept.Write(choice + " of " + std::to_string(cpu_s) + " s on the CPU, " +
             (gpu_s ? std::to_string(*gpu_s) + " s on the GPU" : "none on the GPU"));
  return choice;
}

}  // namespace

std::shared_ptr<Engine> OpenFaster(const std::function<std::unique_ptr<const Files>()>& on_cpu,
                                   const std::string& gpu_path, const Engine::Options& options) {
  const auto cpu_files = on_cpu(), gpu_files = Files::At(gpu_path);
  const Manifest cpu(*cpu_files), gpu(*gpu_files);
  if (cpu.identity != gpu.identity) {
    throw Error(Code::kUsage, "gpu_path names a bundle of another model")
        .Where(gpu_path)
        .Expected("the checkpoint and quantization of " + cpu.source.where());
  }
  std::optional<std::string> driver;
  try {
    driver = FindDevice(gpu.variants.front().kind, options.cache).driver;
  } catch (const Error&) {  // no GPU
  }
  const bool on_gpu = driver && Choose(on_cpu, gpu_path, options,
                                       *driver + " " MLCPIPE_ABI " " + cpu.identity + " " + cpu.variants.front().name + " " +
                                           gpu.variants.front().name) == kGpu;
  return on_gpu ? std::make_shared<Engine>(Files::At(gpu_path), OnGpu(options))
                : std::make_shared<Engine>(on_cpu(), options);
}

}  // namespace mlcpipe
