#include "cli/connection.h"

#include <arpa/inet.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>

#include "bundle/files.h"
#include "cli/json_text.h"
#include "cli/printable.h"

namespace mlcpipe::cli {
namespace {

constexpr double kSendS = 30, kLingerS = 2;
constexpr size_t kLingerBytes = 8 << 20;

int Milliseconds(std::chrono::steady_clock::duration left) {
  return static_cast<int>(std::max<int64_t>(0, std::chrono::ceil<std::chrono::milliseconds>(left).count()));
}

std::chrono::steady_clock::duration Seconds(double seconds) {
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(seconds));
}

const char* Reason(int status) {
  switch (status) {
    case 200: return "OK";
    case 400: return "Bad Request";
    case 401: return "Unauthorized";
    case 403: return "Forbidden";
    case 404: return "Not Found";
    case 405: return "Method Not Allowed";
    case 408: return "Request Timeout";
    case 413: return "Content Too Large";
    case 421: return "Misdirected Request";
    case 501: return "Not Implemented";
    case 503: return "Service Unavailable";
    default: return "Error";
  }
}

std::string Head(int status, const char* type) {
  return "HTTP/1.1 " + std::to_string(status) + " " + Reason(status) + "\r\ncontent-type: " + type + "\r\n";
}

// Whether a header Host names this machine: an address of its loopback, "localhost", or `own`.
bool IsOwnName(const std::string& name, const std::string& own) {
  in_addr v4;
  if (inet_pton(AF_INET, name.c_str(), &v4) == 1) return ntohl(v4.s_addr) >> 24 == 127;
  if (name.size() > 2 && name.front() == '[' && name.back() == ']') {
    in6_addr v6;
    return inet_pton(AF_INET6, name.substr(1, name.size() - 2).c_str(), &v6) == 1 && IsLoopbackAddress(v6);
  }
  return EqualWords(name, "localhost") || EqualWords(name, own);
}

bool IsOpen(const std::string& path) { return path == "/health" || path == "/v1/health"; }

}  // namespace

bool IsLoopbackAddress(const in6_addr& address) {
  return IN6_IS_ADDR_LOOPBACK(&address) || (IN6_IS_ADDR_V4MAPPED(&address) && address.s6_addr[12] == 127);
}

Connection::Connection(const Site& site, int socket)
    : site_(site),
      socket_(socket),
      wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
      reader_([this](char* to, size_t bytes) { return Read(to, bytes); }) {}

Connection::~Connection() {
  if (wake_ >= 0) close(wake_);
  close(socket_);
}

void Connection::Serve() {
  if (wake_ < 0) return;
  try {
    while (ServeOne()) {
    }
    Linger();
  } catch (const Gone&) {
  } catch (const std::bad_alloc&) {  // not even for an error: the connection is closed
  }
}

void Connection::Refuse(const ApiError& error) {
  try {
    RespondError(error, false);
    Linger();
  } catch (const Gone&) {
  } catch (const std::bad_alloc&) {
  }
}

bool Connection::ServeOne() {
  HttpRequest request;
  bool whole = false;
  reading_ = false;
  status_ = 0;
  tokens_ = 0;
  began_ = Clock::now();
  deadline_ = began_ + Seconds(site_.read_timeout_s);
  try {
    if (!reader_.ReadHead(&request)) return false;
    Admit(request);
    const std::string* expect = request.Header("expect");
    if (expect && EqualWords(*expect, "100-continue") && request.chunked) Send("HTTP/1.1 100 Continue\r\n\r\n");
    reader_.ReadBody(&request);
    whole = true;
    Route(request);
  } catch (const ApiError& error) {
    whole = whole && request.keep_alive;
    RespondError(error, whole);
  } catch (const std::bad_alloc&) {
    if (status_) throw Gone();  // in the middle of a stream
    whole = false;
    RespondError({503, "out of memory", "out_of_memory", "", 5}, whole);
  } catch (const Gone&) {
    status_ = 499;
    Log(request);
    throw;
  }
  Log(request);
  return whole && request.keep_alive;
}

size_t Connection::Read(char* to, size_t bytes) {
  for (;;) {
    const ssize_t count = recv(socket_, to, bytes, 0);
    if (count > 0 && !reading_) {
      reading_ = true;
      began_ = Clock::now();
      deadline_ = began_ + Seconds(site_.read_timeout_s);
    }
    if (count >= 0) return static_cast<size_t>(count);
    if (errno != EAGAIN && errno != EINTR) throw Gone();
    pollfd ready[] = {{socket_, POLLIN, 0}, {site_.stop, POLLIN, 0}};
    poll(ready, 2, Milliseconds(deadline_ - Clock::now()));
    if (ready[1].revents) return 0;
    if (Clock::now() < deadline_) continue;
    if (!reading_) return 0;
    throw ApiError{408, "the request did not come in time", "", ""};
  }
}

void Connection::Send(std::string_view data) {
  const auto deadline = Clock::now() + Seconds(kSendS);
  while (!data.empty()) {
    const ssize_t count = send(socket_, data.data(), data.size(), MSG_NOSIGNAL);
    if (count > 0) {
      data.remove_prefix(static_cast<size_t>(count));
      continue;
    }
    if (errno != EAGAIN && errno != EINTR) throw Gone();
    pollfd ready{socket_, POLLOUT, 0};
    poll(&ready, 1, Milliseconds(deadline - Clock::now()));
    if (Clock::now() >= deadline) throw Gone();
  }
}

// A socket that is closed while bytes come loses what was sent: the client is to close first.
void Connection::Linger() {
  shutdown(socket_, SHUT_WR);
  const auto deadline = Clock::now() + Seconds(kLingerS);
  char unread[4096];
  for (size_t bytes = 0; bytes < kLingerBytes && Clock::now() < deadline;) {
    const ssize_t count = recv(socket_, unread, sizeof unread, 0);
    if (count > 0) {
      bytes += static_cast<size_t>(count);
      continue;
    }
    if (count == 0 || (errno != EAGAIN && errno != EINTR)) return;
    pollfd ready{socket_, POLLIN, 0};
    poll(&ready, 1, Milliseconds(deadline - Clock::now()));
  }
}

void Connection::Log(const HttpRequest& request) const {
  const double seconds = std::chrono::duration<double>(Clock::now() - began_).count();
  const std::string method = request.method.empty() ? "-" : Printable(request.method);
  const std::string target = request.target.empty() ? "-" : Printable(request.target.substr(0, 200));
  if (site_.json_log) {
    std::fprintf(stderr, "{\"method\": %s, \"target\": %s, \"status\": %d, \"tokens\": %lld, \"seconds\": %.3f}\n",
                 JsonText(method).c_str(), JsonText(target).c_str(), status_, static_cast<long long>(tokens_), seconds);
  } else {
    std::fprintf(stderr, "%s %s %d, %lld tokens, %.3f s\n", method.c_str(), target.c_str(), status_,
                 static_cast<long long>(tokens_), seconds);
  }
}

void Connection::Admit(const HttpRequest& request) const {
  if (site_.loopback || site_.key_digests.empty()) CheckHost(request);
  if (site_.key_digests.empty() || IsOpen(request.path)) return;
  const std::string* given = request.Header("x-api-key");
  std::string key = given ? *given : "";
  if (const std::string* authorization = request.Header("authorization")) {
    const size_t space = std::min(authorization->find(' '), authorization->size());
    if (EqualWords(authorization->substr(0, space), "bearer")) {
      const size_t begin = authorization->find_first_not_of(" \t", space);
      key = begin == std::string::npos ? "" : authorization->substr(begin);
    }
  }
  const std::string digest = Sha256(key);
  int equal = 0;
  for (const std::string& known : site_.key_digests) {  // each of them to its end, whatever is found
    int different = 0;
    for (size_t i = 0; i < digest.size(); ++i) different |= digest[i] ^ known[i];
    equal |= different == 0;
  }
  if (!equal) throw ApiError{401, "the API key is missing or wrong", "invalid_api_key", ""};
}

// Refuses what a page of another site makes a browser send: other origins, and on loopback other hosts' names.
void Connection::CheckHost(const HttpRequest& request) const {
  const std::string* header = request.Header("host");
  const std::string host = header ? *header : "";
  const size_t port = host.find(':', host[0] == '[' ? std::min(host.find(']'), host.size()) : 0);
  const std::string name = host.substr(0, port);
  if (site_.loopback && !IsOwnName(name, site_.host)) {
    throw ApiError{421, "this server answers to 127.0.0.1 and localhost alone", "wrong_host", ""};
  }
  const std::string* origin = request.Header("origin");
  if (!origin) return;
  const size_t scheme = origin->find("://");
  if (scheme == std::string::npos || origin->substr(scheme + 3) != host) {
    throw ApiError{403, "pages of other sites may not ask", "wrong_origin", ""};
  }
}

void Connection::Route(const HttpRequest& request) {
  constexpr std::string_view kModels = "/v1/models";
  const std::string& path = request.path;
  const bool chats = path == "/v1/chat/completions", completes = path == "/v1/completions";
  const bool names = path.compare(0, kModels.size() + 1, std::string(kModels) + "/") == 0;
  if (!chats && !completes && !names && !IsOpen(path) && path != kModels) {
    throw ApiError{404, "there is no " + request.method + " " + path.substr(0, 200), "not_found", ""};
  }
  if (request.method != (chats || completes ? "POST" : "GET")) {
    throw ApiError{405, "the path does not take " + request.method, "not_allowed", ""};
  }
  if (chats) {
    Answer(request, ReadChatBody(request.body, site_.served));
  } else if (completes) {
    Answer(request, ReadCompletionBody(request.body, site_.served));
  } else if (names) {
    const std::string name = path.substr(kModels.size() + 1);
    CheckModel(name, site_.served);
    Respond(200, ModelJson(name, site_.served), request.keep_alive);
  } else {
    Respond(200, path == kModels ? ModelsJson(site_.served) : "{\"status\":\"ok\"}", request.keep_alive);
  }
}

void Connection::Respond(int status, const std::string& json, bool keep_alive, const std::string& headers) {
  const std::string data = Head(status, "application/json") + "content-length: " + std::to_string(json.size()) + "\r\n" +
                           headers + (keep_alive ? "\r\n" : "connection: close\r\n\r\n") + json;
  status_ = status;  // after what may throw
  Send(data);
}

void Connection::RespondError(const ApiError& error, bool keep_alive) {
  std::string headers;
  if (error.retry_after_s) headers += "retry-after: " + std::to_string(error.retry_after_s) + "\r\n";
  if (error.status == 401) headers += "www-authenticate: Bearer\r\n";
  Respond(error.status, error.Json(), keep_alive, headers);
}

}  // namespace mlcpipe::cli
