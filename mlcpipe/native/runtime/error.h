// Errors of the native runtime: the tree of mlcpipe/errors.py, with the parts of its one line.
#ifndef MLCPIPE_RUNTIME_ERROR_H_
#define MLCPIPE_RUNTIME_ERROR_H_

#include <exception>
#include <string>
#include <utility>

namespace mlcpipe {

// The numbers are part of the C API: new ones come last.
enum class Code : int {
  kUsage = 1,
  kConfig,
  kTokenizer,
  kTemplate,
  kBundle,
  kResource,
  kTarget,
  kCompute,
  kCancelled,
  kInternal,
};

// An error: what failed and, if known, where, what was expected, what was found, and the next step.
struct Error : std::exception {
  Code code;
  std::string what_failed, where, expected, found, next_step;

  Error(Code code, std::string what_failed) : code(code), what_failed(std::move(what_failed)) { Join(); }

  Error& Where(std::string text) { return Set(&where, std::move(text)); }
  Error& Expected(std::string text) { return Set(&expected, std::move(text)); }
  Error& Found(std::string text) { return Set(&found, std::move(text)); }
  Error& Next(std::string text) { return Set(&next_step, std::move(text)); }

  // One line, as `str(error)` in Python.
  const char* what() const noexcept override { return line_.c_str(); }

 private:
  static constexpr size_t kMaxBytes = 400;  // of a part: a value of a hostile file may have millions

  std::string line_;

  Error& Set(std::string* part, std::string text) {
    if (text.size() > kMaxBytes) text = text.substr(0, kMaxBytes) + "... (" + std::to_string(text.size()) + " bytes)";
    *part = std::move(text);
    Join();
    return *this;
  }

  void Join() {
    line_ = what_failed;
    if (!where.empty()) line_ += " in " + where;
    if (!expected.empty()) line_ += "; expected " + expected;
    if (!found.empty()) line_ += "; found " + found;
    if (!next_step.empty()) line_ += "; " + next_step;
    for (char& c : line_) {
      if (static_cast<unsigned char>(c) < 32) c = ' ';
    }
  }
};

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_ERROR_H_
