// Text as JSON writes it.
#ifndef MLCPIPE_RUNTIME_CLI_JSON_TEXT_H_
#define MLCPIPE_RUNTIME_CLI_JSON_TEXT_H_

#include <cstdio>
#include <string>

namespace mlcpipe::cli {

// With its quotes; UTF-8 stays as it is.
inline std::string JsonText(const std::string& text) {
  std::string json = "\"";
  for (const char c : text) {
    const auto code = static_cast<unsigned char>(c);
    if (code < 32) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", code);
      json += escaped;
    } else {
      if (c == '"' || c == '\\') json += '\\';
      json += c;
    }
  }
  return json + "\"";
}

}  // namespace mlcpipe::cli

#endif  // MLCPIPE_RUNTIME_CLI_JSON_TEXT_H_
