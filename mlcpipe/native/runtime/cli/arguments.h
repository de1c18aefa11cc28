// The command line: what to do, with which model, and how.
#ifndef MLCPIPE_RUNTIME_CLI_ARGUMENTS_H_
#define MLCPIPE_RUNTIME_CLI_ARGUMENTS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "mlcpipe.h"

namespace mlcpipe::cli {

enum class Command { kChat, kBench, kDoctor, kServe, kLicenses, kHelp };

// Of `serve`.
struct ServeArguments {
  std::string host = "127.0.0.1", api_key_file, name, draft;
  std::vector<std::string> aliases;
  int64_t port = 8000, max_queue = 8;
  std::optional<int64_t> sequences, kv_tokens;  // of `doctor` too
  double read_timeout_s = 30, drain_s = 30;
};

struct Arguments {
  Command command = Command::kChat;
  std::string program;  // as it was called
  std::string model;    // a folder or file; of the program itself, or beside it, where none is named
  std::optional<std::string> prompt, system;
  std::string session;  // a file that the chat continues from and is saved to; "" is none
  std::string variant, device, gpu_model;
  std::string cache;  // a folder
  int64_t max_tokens = 0, context = 0, prompt_tokens = 512;
  int32_t threads = 0;
  std::optional<uint64_t> seed;
  double temperature = -1, top_p = -1;  // below 0: the defaults
  bool raw = false, json = false;
  ServeArguments serve;
};

// Ends the program with one line for an argument that is wrong.
Arguments Parsed(int count, char** words);

// The text of `--help`.
std::string Usage(const std::string& program);

// Prints "error: " and the line to stderr, and ends the program.
[[noreturn]] void Fail(const std::string& line);

// The line of the last error of this thread.
std::string LastError();

// Fails with the runtime's last error unless `code` is MLCPIPE_OK.
void Check(int32_t code);

mlcpipe_options OptionsOf(const Arguments& arguments);

// `sampling`, but for what the arguments say; with a new seed in each run where none is given.
mlcpipe_sampling SamplingOf(const Arguments& arguments, mlcpipe_sampling sampling);

// A struct of the C API with its size.
template <typename Struct>
Struct Sized() {
  Struct made{};
  made.size = sizeof made;
  return made;
}

}  // namespace mlcpipe::cli

#endif  // MLCPIPE_RUNTIME_CLI_ARGUMENTS_H_
