// A server with OpenAI's API.
#ifndef MLCPIPE_RUNTIME_CLI_SERVE_H_
#define MLCPIPE_RUNTIME_CLI_SERVE_H_

#include "cli/arguments.h"
#include "cli/openai.h"

namespace mlcpipe::cli {

// Returns the program's exit status, after SIGINT or SIGTERM.
int Serve(const Arguments& arguments);

// The facts about the model in the files of a bundle.
Served ServedBundle(const Arguments& arguments, mlcpipe_engine engine);

}  // namespace mlcpipe::cli

#endif  // MLCPIPE_RUNTIME_CLI_SERVE_H_
