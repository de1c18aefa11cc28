// Requests of HTTP/1.1 (RFC 9112), read strictly and within limits.
#ifndef MLCPIPE_RUNTIME_CLI_HTTP_H_
#define MLCPIPE_RUNTIME_CLI_HTTP_H_

#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mlcpipe::cli {

// A refusal as OpenAI's API writes it. `code` and `param` may be "".
struct ApiError {
  int status;
  std::string message, code, param;
  int retry_after_s = 0;

  // {"error": …}
  std::string Json() const;
};

struct HttpRequest {
  std::string method, target;
  std::string path;  // of the target, decoded and without its query; it may have any bytes
  std::vector<std::pair<std::string, std::string>> headers;  // names in lower case
  std::string body;
  bool keep_alive = false, chunked = false;  // what the client takes: later requests, an answer in chunks

  // null where the header is missing. Throws ApiError where it comes twice.
  const std::string* Header(std::string_view name) const;
};

// Reads the requests of one connection, one after the other. Behind an ApiError nothing more can be read.
class HttpReader {
 public:
  static constexpr size_t kMaxLineBytes = 8 << 10, kMaxHeadBytes = 32 << 10, kMaxHeaders = 100, kMaxBodyBytes = 1 << 20;

  // Reads what there is, at most so many bytes, but waits for the first one; 0 at the end. It may throw.
  using Source = std::function<size_t(char*, size_t)>;
  explicit HttpReader(Source source) : source_(std::move(source)) {}

  // The request up to its body; false where the client closed the connection before it. Throws ApiError.
  bool ReadHead(HttpRequest* request);
  // Throws ApiError.
  void ReadBody(HttpRequest* request);

 private:
  Source source_;
  std::string buffer_;
  size_t begin_ = 0;  // of what was read and not taken yet

  bool Fill();
  std::string Take(size_t bytes);
  // The text up to `mark`, which is dropped. Throws an ApiError of this status where it is longer.
  std::string TakeUntil(std::string_view mark, size_t max_bytes, int status);
  std::string TakeBytes(size_t bytes);
  std::string TakeChunks();
};

// Whether two words are equal, but for the case of ASCII letters; `lower` is in lower case.
bool EqualWords(std::string_view word, std::string_view lower);

}  // namespace mlcpipe::cli

#endif  // MLCPIPE_RUNTIME_CLI_HTTP_H_
