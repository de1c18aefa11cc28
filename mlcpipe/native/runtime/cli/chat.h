// A chat in the terminal, or one answer.
#ifndef MLCPIPE_RUNTIME_CLI_CHAT_H_
#define MLCPIPE_RUNTIME_CLI_CHAT_H_

#include "cli/arguments.h"

namespace mlcpipe::cli {

// Returns the program's exit status.
int Chat(const Arguments& arguments);

}  // namespace mlcpipe::cli

#endif  // MLCPIPE_RUNTIME_CLI_CHAT_H_
