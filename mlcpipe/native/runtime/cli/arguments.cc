#include "cli/arguments.h"

#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <type_traits>

#include "cli/printable.h"

namespace mlcpipe::cli {
namespace {

constexpr int kFailed = 2;
constexpr int64_t kSequences = 4, kMostSequences = 8;
constexpr char kUsage[] =
    " [COMMAND] [OPTIONS]\n\n"
    "Chats with the model in the terminal.\n\n"
    "commands:\n"
    "  bench                measure a prompt and an answer\n"
    "  doctor               say what the model takes, and whether it fits\n"
    "  serve                answer over HTTP, for programs that speak to OpenAI\n\n"
    "options:\n"
    "  -p, --prompt TEXT    answer one prompt; without a terminal, what is read is the prompt\n"
    "  -m, --model PATH     a bundle, or a file of its data (default: the program's own)\n"
    "      --system TEXT    instructions that come first\n"
    "      --session FILE   continue the chat in this file, if there is one, and save it there at the end\n"
    "      --raw            continue the prompt as plain text, without the chat template\n"
    "      --greedy         take the most probable token each time\n"
    "      --temperature T  (default: the model's, else 0.7)\n"
    "      --top-p P        (default: the model's, else 0.95)\n"
    "      --seed N         draw the same tokens in each run\n"
    "      --max-tokens N   of an answer (default: what the context has room for)\n"
    "      --prompt-tokens N  of bench (default: 512)\n"
    "      --context N      tokens of prompt and answer (default: what memory has room for)\n"
    "      --threads N      (default: the physical cores)\n"
    "      --variant NAME   of the kernels (default: the best for this CPU)\n"
    "      --device DEVICE  cpu, vulkan, metal, or auto with --gpu-model (default: what the model was compiled for)\n"
    "      --gpu-model PATH  the same model for a GPU, which auto takes where it is faster\n"
    "      --json           print results as JSON\n"
    "      --host ADDRESS   of serve: where to listen; 0.0.0.0 is every network (default: 127.0.0.1)\n"
    "      --port N         of serve; 0 takes any free one (default: 8000)\n"
    "      --api-key-file F  of serve: keys that clients must send, one a line; or set MLCPIPE_API_KEY\n"
    "      --name NAME      of serve: the model's name for clients (default: the checkpoint's)\n"
    "      --alias NAME     of serve: another name that the model answers to; * is any\n"
    "      --sequences N    of serve and doctor: answers at the same time, 1 to 8 (default of serve: 4)\n"
    "      --kv-tokens N    of serve and doctor: tokens that they hold together (default: what memory has room for)\n"
    "      --draft MODE     of serve: lookup checks tokens that answers repeat of their texts, or off (default: lookup,\n"
    "                       and the model's own draft head if it has one)\n"
    "      --max-queue N    of serve: requests that may wait; one more gets 503 (default: 8)\n"
    "      --read-timeout S  of serve: seconds for a request to come (default: 30)\n"
    "      --drain S        of serve: seconds that answers have to finish in the end (default: 30)\n"
    "      --licenses       print the licences of what the program is made of\n"
    "  -h, --help           show this\n";

template <typename Number>
Number NumberOf(const std::string& option, const std::string& text) {
  char* end = nullptr;
  errno = 0;
  Number number;
  if constexpr (std::is_floating_point_v<Number>) {
    number = std::strtod(text.c_str(), &end);
  } else if constexpr (std::is_unsigned_v<Number>) {
    number = std::strtoull(text.c_str(), &end, 10);
    if (text.find('-') != std::string::npos) errno = ERANGE;
  } else {
    const long long value = std::strtoll(text.c_str(), &end, 10);
    number = static_cast<Number>(value);
    if (number != value) errno = ERANGE;
  }
  if (text.empty() || *end || errno) Fail(option + "; expected a number; found " + text);
  return number;
}

// Options that take no value.
bool TakeFlag(const std::string& option, Arguments* to) {
  if (option == "--raw") to->raw = true;
  else if (option == "--json") to->json = true;
  else if (option == "--greedy") to->temperature = 0;
  else if (option == "--licenses") to->command = Command::kLicenses;
  else if (option == "-h" || option == "--help") to->command = Command::kHelp;
  else return false;
  return true;
}

bool TakeServeOption(const std::string& option, const std::string& value, ServeArguments* to) {
  if (option == "--host") to->host = value;
  else if (option == "--port") to->port = NumberOf<int64_t>(option, value);
  else if (option == "--api-key-file") to->api_key_file = value;
  else if (option == "--name") to->name = value;
  else if (option == "--alias") to->aliases.push_back(value);
  else if (option == "--sequences") to->sequences = NumberOf<int64_t>(option, value);
  else if (option == "--kv-tokens") to->kv_tokens = NumberOf<int64_t>(option, value);
  else if (option == "--draft") to->draft = value;
  else if (option == "--max-queue") to->max_queue = NumberOf<int64_t>(option, value);
  else if (option == "--read-timeout") to->read_timeout_s = NumberOf<double>(option, value);
  else if (option == "--drain") to->drain_s = NumberOf<double>(option, value);
  else return false;
  return true;
}

bool TakeOption(const std::string& option, const std::string& value, Arguments* to) {
  if (option == "-p" || option == "--prompt") to->prompt = value;
  else if (option == "-m" || option == "--model") to->model = value;
  else if (option == "--system") to->system = value;
  else if (option == "--session") to->session = value;
  else if (option == "--variant") to->variant = value;
  else if (option == "--device") to->device = value;
  else if (option == "--gpu-model") to->gpu_model = value;
  else if (option == "--temperature") to->temperature = NumberOf<double>(option, value);
  else if (option == "--top-p") to->top_p = NumberOf<double>(option, value);
  else if (option == "--seed") to->seed = NumberOf<uint64_t>(option, value);
  else if (option == "--max-tokens") to->max_tokens = NumberOf<int64_t>(option, value);
  else if (option == "--prompt-tokens") to->prompt_tokens = NumberOf<int64_t>(option, value);
  else if (option == "--context") to->context = NumberOf<int64_t>(option, value);
  else if (option == "--threads") to->threads = NumberOf<int32_t>(option, value);
  else return TakeServeOption(option, value, &to->serve);
  return true;
}

// The program's own file where it carries a model, else the file of data beside it.
std::string OwnModel(const std::string& program) {
  char path[PATH_MAX + 1];
  const ssize_t length = readlink("/proc/self/exe", path, PATH_MAX);
  const std::string own = length > 0 ? std::string(path, static_cast<size_t>(length)) : program;
  const std::string beside = own + ".mlcp";
  return access(beside.c_str(), F_OK) == 0 ? beside : own;
}

// For what is learned of GPU drivers; "" where the user has no folder for it.
std::string CacheFolder() {
  const char *cache = std::getenv("XDG_CACHE_HOME"), *home = std::getenv("HOME");
  if (cache && *cache) return std::string(cache) + "/mlcpipe/native";
  return home && *home ? std::string(home) + "/.cache/mlcpipe/native" : "";
}

void CheckSeveral(const Arguments& arguments) {
  const auto& sequences = arguments.serve.sequences;
  const auto& kv_tokens = arguments.serve.kv_tokens;
  const bool serves = arguments.command == Command::kServe, plans = arguments.command == Command::kDoctor;
  if ((sequences || kv_tokens) && !serves && !plans) {
    Fail("--sequences and --kv-tokens have no effect; use them with serve or doctor");
  }
  if (sequences && (*sequences < 1 || *sequences > kMostSequences)) {
    Fail("--sequences; expected 1 to 8; found " + std::to_string(*sequences));
  }
  if (kv_tokens && *kv_tokens < 1) Fail("--kv-tokens; expected a number from 1; found " + std::to_string(*kv_tokens));
  if (kv_tokens && plans && !sequences) Fail("--kv-tokens has no effect; use it with --sequences");
}

}  // namespace

void Fail(const std::string& line) {
  std::fflush(stdout);
  std::fprintf(stderr, "error: %s\n", Printable(line).c_str());
  std::exit(kFailed);
}

std::string LastError() {
  auto error = Sized<mlcpipe_error>();
  mlcpipe_last_error(&error);
  return error.line;
}

void Check(int32_t code) {
  if (code != MLCPIPE_OK) Fail(LastError());
}

std::string Usage(const std::string& program) { return "usage: " + program + kUsage; }

Arguments Parsed(int count, char** words) {
  Arguments arguments;
  arguments.program = count ? words[0] : "chat";
  for (int i = 1; i < count; ++i) {
    std::string option = words[i];
    if (i == 1 && option == "bench") {
      arguments.command = Command::kBench;
    } else if (i == 1 && option == "doctor") {
      arguments.command = Command::kDoctor;
    } else if (i == 1 && option == "serve") {
      arguments.command = Command::kServe;
    } else if (!TakeFlag(option, &arguments)) {
      const size_t equals = option.rfind("--", 0) == 0 ? option.find('=') : std::string::npos;
      std::string value;
      if (equals != std::string::npos) {
        value = option.substr(equals + 1);
        option.resize(equals);
      } else if (i + 1 < count) {
        value = words[++i];
      } else if (Arguments unused; TakeOption(option, "0", &unused)) {
        Fail(option + "; expected a value; found none");
      }
      if (!TakeOption(option, value, &arguments)) Fail("no such option or command; found " + option + "; see --help");
    }
  }
  if (!arguments.gpu_model.empty() && arguments.device != "auto") {
    Fail("--gpu-model has no effect; use it with --device auto");
  }
  CheckSeveral(arguments);
  arguments.cache = CacheFolder();
  if (arguments.model.empty()) arguments.model = OwnModel(arguments.program);
  return arguments;
}

mlcpipe_options OptionsOf(const Arguments& arguments) {
  auto options = Sized<mlcpipe_options>();
  options.variant = arguments.variant.empty() ? nullptr : arguments.variant.c_str();
  options.context_length = arguments.context;
  options.threads = arguments.threads;
  options.sequences = arguments.serve.sequences.value_or(arguments.command == Command::kServe ? kSequences : 0);
  options.kv_tokens = arguments.serve.kv_tokens.value_or(0);
  options.device = arguments.device.empty() ? nullptr : arguments.device.c_str();
  options.gpu_path = arguments.gpu_model.empty() ? nullptr : arguments.gpu_model.c_str();
  options.cache = arguments.cache.c_str();
  options.draft = arguments.serve.draft.empty() ? nullptr : arguments.serve.draft.c_str();
  return options;
}

mlcpipe_sampling SamplingOf(const Arguments& arguments, mlcpipe_sampling sampling) {
  if (arguments.temperature >= 0) sampling.temperature = arguments.temperature;
  if (arguments.top_p >= 0) sampling.top_p = arguments.top_p;
  if (arguments.seed) {
    sampling.seed = *arguments.seed;
  } else {
    std::random_device random;
    sampling.seed = uint64_t{random()} << 32 | random();
  }
  return sampling;
}

}  // namespace mlcpipe::cli
