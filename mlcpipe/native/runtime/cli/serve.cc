#include "cli/serve.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <list>
#include <optional>

#include "bundle/files.h"
#include "cli/connection.h"
#include "cli/printable.h"
#include "cli/thread.h"

namespace mlcpipe::cli {
namespace {

constexpr size_t kMaxConnections = 16;

// The file's lines and MLCPIPE_API_KEY, hashed.
std::vector<std::string> KeyDigests(const std::string& path) {
  std::vector<std::string> digests;
  const char* key = std::getenv("MLCPIPE_API_KEY");
  if (key && *key) digests.push_back(Sha256(key));
  if (path.empty()) return digests;
  std::ifstream file(path);
  const size_t before = digests.size();
  for (std::string line; std::getline(file, line);) {
    line.resize(line.find_last_not_of(" \t\r") + 1);
    if (!line.empty()) digests.push_back(Sha256(line));
  }
  if (!file.eof() || digests.size() == before) Fail("--api-key-file; expected a file with a key; found none in " + path);
  return digests;
}

int Listen(const ServeArguments& arguments) {
  const std::string port = std::to_string(arguments.port), where = arguments.host + ":" + port;
  if (arguments.port < 0 || arguments.port > 65535) Fail("--port; expected 0 to 65535; found " + port);
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  const int unknown = getaddrinfo(arguments.host.c_str(), port.c_str(), &hints, &found);
  if (unknown) Fail("cannot listen on " + where + "; found " + gai_strerror(unknown));
  const int on = 1, made = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  setsockopt(made, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (made < 0 || bind(made, found->ai_addr, found->ai_addrlen) || listen(made, SOMAXCONN)) {
    Fail("cannot listen on " + where + "; found " + std::strerror(errno) +
         "; stop the other program, or choose another --host or --port");
  }
  freeaddrinfo(found);
  return made;
}

sockaddr_storage BoundTo(int socket) {
  sockaddr_storage name{};
  socklen_t bytes = sizeof name;
  getsockname(socket, reinterpret_cast<sockaddr*>(&name), &bytes);
  return name;
}

// Whether only programs of this machine reach the socket, however the host was written.
bool IsLoopback(int socket) {
  const sockaddr_storage name = BoundTo(socket);
  if (name.ss_family == AF_INET6) return IsLoopbackAddress(reinterpret_cast<const sockaddr_in6*>(&name)->sin6_addr);
  return ntohl(reinterpret_cast<const sockaddr_in*>(&name)->sin_addr.s_addr) >> 24 == 127;
}

std::string AddressOf(int socket, const std::string& host) {
  sockaddr_storage name = BoundTo(socket);
  const bool v6 = name.ss_family == AF_INET6;
  const uint16_t port = v6 ? reinterpret_cast<sockaddr_in6*>(&name)->sin6_port
                           : reinterpret_cast<sockaddr_in*>(&name)->sin_port;
  return "http://" + (v6 ? "[" + host + "]" : host) + ":" + std::to_string(ntohs(port));
}

// The threads of connections: so many are served, and as many again are told that there are too many.
class Connections {
 public:
  explicit Connections(const Site& site) : site_(site) {}

  void Add(int socket) {
    Join(false);
    const bool serves = threads_.size() < kMaxConnections;
    if (threads_.size() >= 2 * kMaxConnections) {
      close(socket);
      return;
    }
    One* one = &threads_.emplace_back();
    one->socket = socket;
    const auto run = [this, one, serves] {
      {
        std::optional<Connection> connection;
        try {
          connection.emplace(site_, one->socket);
        } catch (const std::bad_alloc&) {
          close(one->socket);
        }
        if (connection && serves) connection->Serve();
        else if (connection) connection->Refuse({503, "there are too many connections", "overloaded", "", 1});
      }
      one->ended = true;
    };
    try {
      if (StartThread(run, &one->thread)) return;
    } catch (const std::bad_alloc&) {
    }
    threads_.pop_back();
    close(socket);
  }

  // Waits for threads that have ended, or for all.
  void Join(bool all) {
    threads_.remove_if([all](const One& one) {
      if (!all && !one.ended) return false;
      pthread_join(one.thread, nullptr);
      return true;
    });
  }

 private:
  struct One {
    int socket = -1;
    pthread_t thread{};
    std::atomic<bool> ended{false};
  };

  const Site& site_;
  std::list<One> threads_;
};

void CheckArguments(const Arguments& arguments) {
  const ServeArguments& serve = arguments.serve;
  const bool other = arguments.prompt || arguments.system || arguments.raw || arguments.seed || arguments.max_tokens;
  if (other) Fail("--prompt, --system, --raw, --seed and --max-tokens have no effect with serve: requests say it");
  if (serve.max_queue < 1) Fail("--max-queue; expected a number from 1; found " + std::to_string(serve.max_queue));
  if (!(serve.read_timeout_s > 0 && serve.read_timeout_s <= 3600)) Fail("--read-timeout; expected up to 3600 seconds");
  if (!(serve.drain_s >= 0 && serve.drain_s <= 3600)) Fail("--drain; expected 0 to 3600 seconds");
  if (serve.name == "*") Fail("--name; expected a name; found *; --alias '*' answers to any name");
}

// A descriptor that can be read for each SIGINT or SIGTERM. Made before other threads, which then do not get them.
int Signals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGINT);
  sigaddset(&set, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  return signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
}

void ReadSignal(int signals) {
  signalfd_siginfo info;
  while (read(signals, &info, sizeof info) > 0) {
  }
}

void AddOrClose(int socket, Connections* connections) {
  try {
    connections->Add(socket);
  } catch (const std::bad_alloc&) {
    close(socket);
  }
}

// Until a signal comes.
void Accept(int listener, int signals, Connections* connections) {
  pollfd ready[] = {{listener, POLLIN, 0}, {signals, POLLIN, 0}};
  for (;;) {
    poll(ready, 2, -1);
    if (ready[1].revents) return;
    const int socket = accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (socket >= 0) AddOrClose(socket, connections);
    else if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) usleep(10'000);
  }
}

void Announce(const Site& site, const std::string& address, const std::string& host) {
  const std::string& name = site.served.names[0];
  std::fprintf(stderr, "%s on %s  (Ctrl-C stops the server)\n", Printable(name).c_str(), address.c_str());
  const char* key = site.key_digests.empty() ? "" : " -H 'Authorization: Bearer YOUR_KEY'";
  std::fprintf(stderr, "curl %s/v1/chat/completions -H 'Content-Type: application/json'%s -d "
               "'{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}'\n", address.c_str(), key);
  if (!site.loopback && site.key_digests.empty()) {
    std::fprintf(stderr, "warning: everybody who reaches %s may use the model: set --api-key-file\n", host.c_str());
  }
}

}  // namespace

int Serve(const Arguments& arguments) {
  CheckArguments(arguments);
  const int signals = Signals();
  const int listener = Listen(arguments.serve);
  Site site;
  site.key_digests = KeyDigests(arguments.serve.api_key_file);
  const std::string& host = arguments.serve.host;
  site.loopback = IsLoopback(listener);
  std::transform(host.begin(), host.end(), std::back_inserter(site.host), [](unsigned char c) { return std::tolower(c); });
  site.read_timeout_s = arguments.serve.read_timeout_s;
  site.json_log = arguments.json;
  site.stop = eventfd(0, EFD_CLOEXEC);
  const mlcpipe_options options = OptionsOf(arguments);
  Check(mlcpipe_open(arguments.model.c_str(), &options, &site.engine));
  site.served = ServedBundle(arguments, site.engine);
  AnswerQueue queue(site.engine, static_cast<size_t>(options.sequences),
                    static_cast<size_t>(arguments.serve.max_queue));
  site.queue = &queue;
  Connections connections(site);
  Announce(site, AddressOf(listener, host), host);
  Accept(listener, signals, &connections);
  close(listener);
  queue.Close();
  eventfd_write(site.stop, 1);
  ReadSignal(signals);
  for (double left_s = arguments.serve.drain_s; left_s > 0 && !queue.WaitIdle(std::min(left_s, 0.1)); left_s -= 0.1) {
    pollfd again{signals, POLLIN, 0};
    if (poll(&again, 1, 0) > 0) break;
  }
  queue.End();
  connections.Join(true);
  Check(mlcpipe_close(site.engine));
  return 0;
}

}  // namespace mlcpipe::cli
