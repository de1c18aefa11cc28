// One connection of a client: its requests are read, admitted and answered, one after the other.
#ifndef MLCPIPE_RUNTIME_CLI_CONNECTION_H_
#define MLCPIPE_RUNTIME_CLI_CONNECTION_H_

#include <netinet/in.h>

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cli/answer_queue.h"
#include "cli/http.h"
#include "cli/openai.h"

namespace mlcpipe::cli {

// ::1, or one of 127.0.0.0/8 that is written as IPv6.
bool IsLoopbackAddress(const in6_addr& address);

// The data that all connections share.
struct Site {
  Served served;
  mlcpipe_engine engine = 0;
  AnswerQueue* queue = nullptr;
  std::vector<std::string> key_digests;  // of the keys that clients may send; none: everybody may ask
  std::string host;                      // that the server listens on, in lower case, as its user wrote it
  bool loopback = true;                  // whether the server listens to this machine alone
  double read_timeout_s = 0;             // for a request to come, and between requests
  bool json_log = false;
  int stop = -1;  // an eventfd that can be read once the server stops
};

class Connection {
 public:
  // Closes the socket in the end. It does not block.
  Connection(const Site& site, int socket);
  ~Connection();
  Connection(const Connection&) = delete;

  // Until the client leaves, fails or is refused, or the server stops.
  void Serve();
  // Answers with an error, whatever the client asks.
  void Refuse(const ApiError& error);

 private:
  using Clock = std::chrono::steady_clock;
  struct Gone {};  // thrown where the client left, or does not read

  const Site& site_;
  const int socket_, wake_;
  HttpReader reader_;
  Clock::time_point began_, deadline_;  // of the request
  bool reading_ = false;                // whether a part of the request came
  int status_ = 0;                      // of the response, once it began
  int64_t tokens_ = 0;                  // of the answer

  size_t Read(char* to, size_t bytes);
  void Send(std::string_view data);
  void Linger();
  void Log(const HttpRequest& request) const;

  // Returns whether another request may follow.
  bool ServeOne();
  void Admit(const HttpRequest& request) const;
  void CheckHost(const HttpRequest& request) const;
  void Route(const HttpRequest& request);
  void Respond(int status, const std::string& json, bool keep_alive, const std::string& headers = "");
  void RespondError(const ApiError& error, bool keep_alive);

  void Answer(const HttpRequest& request, const Body& body);
  ReasoningSplitter::State CheckPrompt(const Body& body) const;
  std::string Rendered(const Body& body, const std::string& variables) const;
  // Waits for news of the answer; false where none came for so long that a stream shall show that it lives.
  bool WaitForNews() const;
  void SendEvents(const HttpRequest& request, const std::string& events);
  void Stream(const HttpRequest& request, const Body& body, Ticket* ticket);
  void EndStream(const HttpRequest& request, const std::string& events);
};

}  // namespace mlcpipe::cli

#endif  // MLCPIPE_RUNTIME_CLI_CONNECTION_H_
