// A program that chats with a model: its own, or one in a bundle.
#include <cinttypes>
#include <cstdio>
#include <vector>

#include "cli/chat.h"
#include "cli/serve.h"

// The licenses of the program's parts; the linker of `mlcpipe package` adds the text.
extern "C" const char mlcpipe_licenses[] __attribute__((weak));

namespace mlcpipe::cli {
namespace {

constexpr int kRuns = 3;
constexpr int64_t kBenchTokens = 128;

double Mib(int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

void PrintRates(const Arguments& arguments, const mlcpipe_statistics& run) {
  const double prefill = static_cast<double>(run.prompt_tokens) / run.prefill_s;
  const double decode = static_cast<double>(run.completion_tokens - 1) / run.decode_s;
  const double bandwidth = static_cast<double>(run.decode_bytes) / run.decode_s / 1e9;
  if (arguments.json) {
    std::printf("{\"load_s\": %.6f, \"prefill_s\": %.6f, \"prefill_tok_s\": %.3f, \"decode_tok_s\": %.3f, "
                "\"decode_gb_s\": %.3f}\n", run.load_s, run.prefill_s, prefill, decode, bandwidth);
  } else {
    std::printf("%10.1f %16.1f %16.1f %10.1f\n", run.load_s * 1e3, prefill, decode, bandwidth);
  }
}

// The first run warms up.
int Bench(const Arguments& arguments) {
  const mlcpipe_options options = OptionsOf(arguments);
  mlcpipe_engine engine = 0;
  Check(mlcpipe_open(arguments.model.c_str(), &options, &engine));
  auto info = Sized<mlcpipe_engine_info>();
  Check(mlcpipe_info(engine, &info));
  std::vector<int32_t> prompt;
  for (int64_t i = 0; i < arguments.prompt_tokens; ++i) prompt.push_back(static_cast<int32_t>(i * 7919 % info.vocab_size));
  auto defaults = Sized<mlcpipe_sampling>();
  mlcpipe_default_sampling(&defaults);
  const mlcpipe_sampling sampling = SamplingOf(arguments, defaults);
  auto request = Sized<mlcpipe_request>();
  request.prompt = prompt.data();
  request.prompt_count = prompt.size();
  request.max_tokens = arguments.max_tokens ? arguments.max_tokens : kBenchTokens;
  request.sampling = &sampling;
  if (!arguments.json) {
    std::printf("%" PRId64 " tokens of prompt, %" PRId64 " of answer, variant %s\n%10s %16s %16s %10s\n",
                arguments.prompt_tokens, request.max_tokens, info.variant, "load ms", "prefill tok/s", "decode tok/s",
                "GB/s");
  }
  for (int run = 0; run < kRuns; ++run) {
    auto statistics = Sized<mlcpipe_statistics>();
    Check(mlcpipe_reset(engine));
    Check(mlcpipe_generate(engine, &request, &statistics));
    if (run) PrintRates(arguments, statistics);
  }
  Check(mlcpipe_close(engine));
  return 0;
}

int Doctor(const Arguments& arguments) {
  const mlcpipe_options options = OptionsOf(arguments);
  auto plan = Sized<mlcpipe_plan_info>();
  Check(mlcpipe_plan(arguments.model.c_str(), &options, &plan));
  if (arguments.json) {
    std::printf("{\"context_length\": %" PRId64 ", \"weights_bytes\": %" PRId64 ", \"kv_bytes\": %" PRId64
                ", \"workspace_bytes\": %" PRId64 ", \"free_bytes\": %" PRId64 ", \"fits\": %s}\n",
                plan.context_length, plan.weights_bytes, plan.kv_bytes, plan.workspace_bytes, plan.free_bytes,
                plan.fits ? "true" : "false");
  } else {
    std::printf("context %" PRId64 " tokens\nweights %.1f MiB, KV cache %.1f MiB, workspace %.1f MiB at most\n",
                plan.context_length, Mib(plan.weights_bytes), Mib(plan.kv_bytes), Mib(plan.workspace_bytes));
    std::printf("free %.1f MiB: %s\n", Mib(plan.free_bytes), plan.fits ? "it fits" : "it does not fit");
  }
  return plan.fits ? 0 : 1;
}

int Run(const Arguments& arguments) {
  switch (arguments.command) {
    case Command::kChat:
      return Chat(arguments);
    case Command::kBench:
      return Bench(arguments);
    case Command::kDoctor:
      return Doctor(arguments);
    case Command::kServe:
      return Serve(arguments);
    case Command::kLicenses:
      std::puts(mlcpipe_licenses ? mlcpipe_licenses : "none were added");
      return 0;
    case Command::kHelp:
      std::fputs(Usage(arguments.program).c_str(), stdout);
      return 0;
  }
  return 0;
}

}  // namespace
}  // namespace mlcpipe::cli

int main(int count, char** words) { return mlcpipe::cli::Run(mlcpipe::cli::Parsed(count, words)); }
