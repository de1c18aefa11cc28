// A command line of the native runtime: token ids in, token ids out, and what a machine does with a bundle.
#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "mlcpipe.h"

namespace {

constexpr char kUsage[] =
    "usage: %s COMMAND BUNDLE [OPTION VALUE]...\n"
    "  generate  answers the prompt --prompt \"ID ID ...\" with token ids\n"
    "  bench     measures a prompt and an answer of --prompt-tokens and --tokens\n"
    "  doctor    says what the bundle takes, and whether it fits\n"
    "options: --tokens N --threads N --context N --variant NAME --seed N --temperature T --stop ID\n";
constexpr int kFailed = 2;

struct Arguments {
  std::string command, path, variant;
  std::vector<int32_t> prompt, stop_ids;
  int64_t tokens = 128, prompt_tokens = 512, context = 0;
  int32_t threads = 0;
  uint64_t seed = 0;
  double temperature = 0;
};

[[noreturn]] void Fail(const std::string& line) {
  std::fprintf(stderr, "error: %s\n", line.c_str());
  std::exit(kFailed);
}

void Check(int32_t code) {
  if (code == MLCPIPE_OK) return;
  mlcpipe_error error{};
  error.size = sizeof error;
  mlcpipe_last_error(&error);
  Fail(error.line);
}

template <typename Number>
Number Parsed(const char* option, const char* text, const char** rest = nullptr) {
  char* end = nullptr;
  errno = 0;
  Number number;
  if constexpr (std::is_floating_point_v<Number>) {
    number = std::strtod(text, &end);
  } else if constexpr (std::is_unsigned_v<Number>) {
    number = std::strtoull(text, &end, 10);
  } else {
    const long long value = std::strtoll(text, &end, 10);
    number = static_cast<Number>(value);
    if (number != value) errno = ERANGE;
  }
  if (end == text || errno || (!rest && *end)) Fail(std::string(option) + "; expected a number; found " + text);
  if (rest) *rest = end + std::strspn(end, " ,");
  return number;
}

std::vector<int32_t> ParsedIds(const char* option, const char* text) {
  std::vector<int32_t> ids;
  while (*text) ids.push_back(Parsed<int32_t>(option, text, &text));
  return ids;
}

void Take(const std::string& option, const char* value, Arguments* to) {
  if (option == "--prompt") to->prompt = ParsedIds("--prompt", value);
  else if (option == "--stop") to->stop_ids = ParsedIds("--stop", value);
  else if (option == "--tokens") to->tokens = Parsed<int64_t>("--tokens", value);
  else if (option == "--prompt-tokens") to->prompt_tokens = Parsed<int64_t>("--prompt-tokens", value);
  else if (option == "--context") to->context = Parsed<int64_t>("--context", value);
  else if (option == "--threads") to->threads = Parsed<int32_t>("--threads", value);
  else if (option == "--seed") to->seed = Parsed<uint64_t>("--seed", value);
  else if (option == "--temperature") to->temperature = Parsed<double>("--temperature", value);
  else if (option == "--variant") to->variant = value;
  else Fail("no such option; found " + option);
}

mlcpipe_options OptionsOf(const Arguments& arguments) {
  return {sizeof(mlcpipe_options), arguments.variant.empty() ? nullptr : arguments.variant.c_str(), arguments.context,
          arguments.threads, nullptr};
}

int32_t Print(void*, int32_t token) {
  std::printf("%" PRId32 " ", token);
  return std::fflush(stdout);
}

mlcpipe_statistics Answer(mlcpipe_engine engine, const Arguments& arguments, mlcpipe_on_token on_token) {
  mlcpipe_sampling sampling{};
  sampling.size = sizeof sampling;
  mlcpipe_default_sampling(&sampling);
  sampling.temperature = arguments.temperature;
  sampling.seed = arguments.seed;
  const mlcpipe_request request{sizeof request,          arguments.prompt.data(),   arguments.prompt.size(),
                                arguments.tokens,        arguments.stop_ids.data(), arguments.stop_ids.size(),
                                &sampling,               on_token,                  nullptr};
  mlcpipe_statistics statistics{};
  statistics.size = sizeof statistics;
  Check(mlcpipe_generate(engine, &request, &statistics));
  return statistics;
}

void PrintRates(const mlcpipe_statistics& statistics) {
  const auto new_tokens = static_cast<double>(statistics.prompt_tokens - statistics.cached_tokens);
  const auto steps = static_cast<double>(statistics.completion_tokens - 1);
  std::printf("load %.1f ms, first token %.1f ms, prompt %.1f tok/s, answer %.1f tok/s, %.1f GB/s\n",
              statistics.load_s * 1e3, statistics.prefill_s * 1e3, new_tokens / statistics.prefill_s,
              steps / statistics.decode_s, static_cast<double>(statistics.decode_bytes) / statistics.decode_s / 1e9);
}

// Three times, the first one of which warms up.
void Bench(mlcpipe_engine engine, Arguments arguments) {
  mlcpipe_engine_info info{};
  info.size = sizeof info;
  Check(mlcpipe_info(engine, &info));
  arguments.prompt.clear();
  for (int64_t i = 0; i < arguments.prompt_tokens; ++i) {
    arguments.prompt.push_back(static_cast<int32_t>(i * 7919 % info.vocab_size));
  }
  std::printf("variant %s\n", info.variant);
  for (int run = 0; run < 3; ++run) {
    Check(mlcpipe_reset(engine));
    PrintRates(Answer(engine, arguments, nullptr));
  }
}

void Doctor(const Arguments& arguments) {
  const mlcpipe_options options = OptionsOf(arguments);
  mlcpipe_plan_info plan{};
  plan.size = sizeof plan;
  Check(mlcpipe_plan(arguments.path.c_str(), &options, &plan));
  const auto mib = [](int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); };
  std::printf("context %" PRId64 " tokens\nweights %.1f MiB, KV cache %.1f MiB, workspace %.1f MiB at most\n",
              plan.context_length, mib(plan.weights_bytes), mib(plan.kv_bytes), mib(plan.workspace_bytes));
  std::printf("free %.1f MiB: %s\n", mib(plan.free_bytes), plan.fits ? "it fits" : "it does not fit");
}

}  // namespace

int main(int count, char** words) {
  const char* name = count ? words[0] : "mlcpipe";
  if (count < 3 || count % 2 == 0) {
    std::fprintf(stderr, kUsage, name);
    return kFailed;
  }
  Arguments arguments;
  arguments.command = words[1];
  arguments.path = words[2];
  for (int i = 3; i < count; i += 2) Take(words[i], words[i + 1], &arguments);
  if (arguments.command == "doctor") {
    Doctor(arguments);
    return 0;
  }
  if (arguments.command != "generate" && arguments.command != "bench") Fail("no such command; found " + arguments.command);
  const mlcpipe_options options = OptionsOf(arguments);
  mlcpipe_engine engine = 0;
  Check(mlcpipe_open(arguments.path.c_str(), &options, &engine));
  if (arguments.command == "bench") {
    Bench(engine, arguments);
  } else {
    Answer(engine, arguments, Print);
    std::puts("");
  }
  Check(mlcpipe_close(engine));
  return 0;
}
