// How a bundle's generation_config.json wants tokens to be drawn.
#ifndef MLCPIPE_RUNTIME_CLI_STATED_SAMPLING_H_
#define MLCPIPE_RUNTIME_CLI_STATED_SAMPLING_H_

#include "cli/arguments.h"

namespace mlcpipe::cli {

// The settings in the file, as in mlcpipe/runtime/stated_sampling.py; `otherwise` where it has none. A field that cannot be
// honoured is left out, with a line on stderr.
mlcpipe_sampling StatedSampling(const std::string& model, const mlcpipe_sampling& otherwise);

}  // namespace mlcpipe::cli

#endif  // MLCPIPE_RUNTIME_CLI_STATED_SAMPLING_H_
