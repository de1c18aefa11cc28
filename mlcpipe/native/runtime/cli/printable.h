// Text that may come from anywhere, for a terminal.
#ifndef MLCPIPE_RUNTIME_CLI_PRINTABLE_H_
#define MLCPIPE_RUNTIME_CLI_PRINTABLE_H_

#include <string>
#include <string_view>

namespace mlcpipe::cli {

// A text without anything that steers a terminal: only printable characters, newline and tab are left, as of Python's
// `sanitize` (mlcpipe/cli/terminal.py); what is not UTF-8 becomes question marks.
std::string Printable(std::string_view text);

}  // namespace mlcpipe::cli

#endif  // MLCPIPE_RUNTIME_CLI_PRINTABLE_H_
