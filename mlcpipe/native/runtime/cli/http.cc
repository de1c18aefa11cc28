#include "cli/http.h"

#include <algorithm>
#include <charconv>
#include <cstring>

#include "cli/json_text.h"
#include "text/utf8.h"

namespace mlcpipe::cli {
namespace {

constexpr size_t kReadBytes = 16 << 10, kMaxChunkLineBytes = 256;

char Lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; }

bool IsUpper(char c) { return c >= 'A' && c <= 'Z'; }

bool IsToken(char c) {
  return IsUpper(c) || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || (c && std::strchr("!#$%&'*+-.^_`|~", c));
}

bool IsVisible(char c) { return c > 32 && c < 127; }

// Of a header's value: all but control characters.
bool IsText(char c) { return c == '\t' || (static_cast<unsigned char>(c) >= 32 && c != 127); }

template <typename Is>
bool All(std::string_view text, Is is) {
  return std::all_of(text.begin(), text.end(), is);
}

ApiError Malformed(std::string what) { return {400, "the request is no HTTP/1.1: " + what, "invalid_request", ""}; }

// The text before `mark`, or all; `*text` is then what is behind it.
std::string_view Part(std::string_view* text, std::string_view mark) {
  const size_t at = text->find(mark);
  const std::string_view part = text->substr(0, at);
  *text = at == std::string_view::npos ? std::string_view() : text->substr(at + mark.size());
  return part;
}

std::string_view Trimmed(std::string_view text) {
  const size_t begin = text.find_first_not_of(" \t");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t") - begin + 1);
}

std::string Decoded(std::string_view target) {
  const std::string_view path = target.substr(0, target.find('?'));
  std::string decoded;
  for (size_t i = 0; i < path.size(); ++i) {
    if (path[i] != '%') {
      decoded += path[i];
      continue;
    }
    unsigned code = 0;
    const char* begin = path.data() + i + 1;
    if (path.size() - i < 3 || std::from_chars(begin, begin + 2, code, 16).ptr != begin + 2) {
      throw Malformed("a target with a broken escape");
    }
    decoded += static_cast<char>(code);
    i += 2;
  }
  return decoded;
}

// Returns whether the client speaks HTTP/1.1, rather than 1.0.
bool ReadRequestLine(std::string_view line, HttpRequest* request) {
  if (line.size() > HttpReader::kMaxLineBytes) throw ApiError{414, "the request's target is too long", "", ""};
  request->method = Part(&line, " ");
  request->target = Part(&line, " ");
  if (request->method.empty() || request->method.size() > 16 || !All(request->method, IsUpper)) {
    throw Malformed("expected a method");
  }
  if (request->target[0] != '/' || !All(request->target, IsVisible)) throw Malformed("expected a path");
  if (line != "HTTP/1.1" && line != "HTTP/1.0") {
    if (line.substr(0, 5) == "HTTP/") throw ApiError{505, "expected HTTP/1.1", "", ""};
    throw Malformed("expected a version");
  }
  request->path = Decoded(request->target);
  return line == "HTTP/1.1";
}

void ReadHeaders(std::string_view lines, HttpRequest* request) {
  while (!lines.empty()) {
    std::string_view line = Part(&lines, "\r\n");
    const size_t colon = line.find(':');
    if (colon == std::string_view::npos) throw Malformed("a header without a colon");
    std::string name(line.substr(0, colon)), value(Trimmed(line.substr(colon + 1)));
    if (name.empty() || !All(name, IsToken) || !All(value, IsText)) throw Malformed("a header");
    std::transform(name.begin(), name.end(), name.begin(), Lower);
    if (request->headers.size() == HttpReader::kMaxHeaders) throw ApiError{431, "too many headers", "", ""};
    request->headers.emplace_back(std::move(name), std::move(value));
  }
}

// The word "close" in the list of a header.
bool Closes(const HttpRequest& request) {
  const std::string* connection = request.Header("connection");
  if (!connection) return false;
  for (std::string_view words = *connection; !words.empty();) {
    if (EqualWords(Trimmed(Part(&words, ",")), "close")) return true;
  }
  return false;
}

// As UTF-8: for each byte that is none, U+FFFD.
std::string Repaired(std::string_view text) {
  std::string repaired;
  for (size_t valid; (valid = utf8::ValidPrefix(text)) < text.size(); text.remove_prefix(valid + 1)) {
    repaired.append(text.substr(0, valid)).append("\uFFFD");
  }
  return repaired.append(text);
}

ApiError TooLarge() {
  return {413, "the body is too large; expected at most " + std::to_string(HttpReader::kMaxBodyBytes) + " bytes",
          "request_too_large", ""};
}

}  // namespace

std::string ApiError::Json() const {
  const char* type = status >= 500 ? "server_error" : "invalid_request_error";
  if (status == 401) type = "authentication_error";
  if (status == 403) type = "permission_error";
  if (status == 404) type = "not_found_error";
  const std::string number = status >= 500 ? std::to_string(status) : "null";
  return "{\"error\":{\"message\":" + JsonText(Repaired(message)) + ",\"type\":\"" + type +
         "\",\"param\":" + (param.empty() ? "null" : JsonText(Repaired(param))) +
         ",\"code\":" + (code.empty() ? number : JsonText(code)) + "}}";
}

const std::string* HttpRequest::Header(std::string_view name) const {
  const std::string* found = nullptr;
  for (const auto& [key, value] : headers) {
    if (key != name) continue;
    if (found) throw Malformed("the header " + key + " comes twice");
    found = &value;
  }
  return found;
}

bool HttpReader::Fill() {
  buffer_.erase(0, begin_);
  begin_ = 0;
  const size_t before = buffer_.size();
  buffer_.resize(before + kReadBytes);
  const size_t count = source_(buffer_.data() + before, kReadBytes);
  buffer_.resize(before + count);
  return count != 0;
}

std::string HttpReader::Take(size_t bytes) {
  std::string taken = buffer_.substr(begin_, bytes);
  begin_ += bytes;
  return taken;
}

std::string HttpReader::TakeUntil(std::string_view mark, size_t max_bytes, int status) {
  for (size_t searched = 0;;) {
    const size_t at = buffer_.find(mark, begin_ + searched), ready = buffer_.size() - begin_;
    // The last bytes may begin the mark.
    const size_t bytes = at == std::string::npos ? ready - std::min(ready, mark.size() - 1) : at - begin_;
    if (bytes > max_bytes) throw ApiError{status, "the request's head is too large", "", ""};
    if (at != std::string::npos) {
      std::string taken = Take(bytes + mark.size());
      taken.resize(bytes);
      return taken;
    }
    searched = bytes;
    if (!Fill()) throw Malformed("it was cut off");
  }
}

std::string HttpReader::TakeBytes(size_t bytes) {
  while (buffer_.size() - begin_ < bytes) {
    if (!Fill()) throw Malformed("it was cut off");
  }
  return Take(bytes);
}

bool HttpReader::ReadHead(HttpRequest* request) {
  *request = {};
  if (begin_ == buffer_.size() && !Fill()) return false;
  const std::string head = TakeUntil("\r\n\r\n", kMaxHeadBytes, 431);
  std::string_view lines = head;
  request->chunked = ReadRequestLine(Part(&lines, "\r\n"), request);
  ReadHeaders(lines, request);
  request->keep_alive = request->chunked && !Closes(*request);
  if (request->chunked && !request->Header("host")) throw Malformed("expected the header Host");
  return true;
}

void HttpReader::ReadBody(HttpRequest* request) {
  const std::string* length = request->Header("content-length");
  const std::string* coding = request->Header("transfer-encoding");
  if (length && coding) throw Malformed("both Content-Length and Transfer-Encoding");
  if (coding) {
    if (!request->chunked) throw Malformed("Transfer-Encoding in HTTP/1.0");
    if (!EqualWords(*coding, "chunked")) throw ApiError{501, "Transfer-Encoding: expected chunked", "", ""};
    request->body = TakeChunks();
  } else if (length) {
    uint64_t bytes = 0;
    const char* end = length->data() + length->size();
    const auto [stop, error] = std::from_chars(length->data(), end, bytes);
    if (stop != end || error == std::errc::invalid_argument) throw Malformed("Content-Length");
    if (error != std::errc() || bytes > kMaxBodyBytes) throw TooLarge();
    request->body = TakeBytes(bytes);
  }
}

std::string HttpReader::TakeChunks() {
  std::string body;
  for (;;) {
    const std::string line = TakeUntil("\r\n", kMaxChunkLineBytes, 400);
    const char* digits_end = line.data() + std::min(line.find(';'), line.size());
    uint32_t bytes = 0;
    const auto [stop, error] = std::from_chars(line.data(), digits_end, bytes, 16);
    if (stop != digits_end || error == std::errc::invalid_argument || !All(line, IsText)) throw Malformed("a chunk");
    if (error != std::errc() || bytes > kMaxBodyBytes - body.size()) throw TooLarge();
    if (!bytes) break;
    body += TakeBytes(bytes);
    if (TakeBytes(2) != "\r\n") throw Malformed("a chunk");
  }
  size_t trailers = 0;
  for (std::string line; !(line = TakeUntil("\r\n", kMaxLineBytes, 431)).empty();) {
    if ((trailers += line.size()) > kMaxHeadBytes) throw ApiError{431, "too many trailers", "", ""};
  }
  return body;
}

bool EqualWords(std::string_view word, std::string_view lower) {
  return std::equal(word.begin(), word.end(), lower.begin(), lower.end(),
                    [](char a, char b) { return Lower(a) == b; });
}

}  // namespace mlcpipe::cli
