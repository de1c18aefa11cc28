#include "cli/chat.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <iostream>
#include <thread>
#include <vector>

#include "cli/chat_json.h"
#include "cli/json_text.h"
#include "cli/printable.h"
#include "cli/stated_sampling.h"

namespace mlcpipe::cli {
namespace {

constexpr int kInterrupted = 130;  // as a shell says of a program that Ctrl-C ended

// Ctrl-C ends the answer that is being written. Between the answers of a chat the first one only says how to end the
// program, as it may have come just behind an answer; the next one ends it. Made before other threads, which then do not
// get the signal.
class Interrupts {
 public:
  explicit Interrupts(bool chats) : spare_(chats), chats_(chats) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    pthread_sigmask(SIG_BLOCK, &set, nullptr);
    std::thread([this, set] { Wait(set); }).detach();
  }

  void Begin(mlcpipe_engine engine) { answering_ = engine; }
  void End() {
    answering_ = 0;
    spare_ = chats_;
  }

 private:
  std::atomic<mlcpipe_engine> answering_{0};
  std::atomic<bool> spare_;
  const bool chats_;

  [[noreturn]] void Wait(sigset_t set) {
    for (;;) {
      int signal = 0;
      sigwait(&set, &signal);
      const mlcpipe_engine engine = answering_;
      if (engine) {
        mlcpipe_cancel(engine);
      } else if (spare_.exchange(false)) {
        std::printf("\nCtrl-C again, or Ctrl-D, ends the program\n> ");
        std::fflush(stdout);
      } else {
        std::puts("");
        std::fflush(stdout);
        _exit(kInterrupted);
      }
    }
  }
};

using Clock = std::chrono::steady_clock;

// The result of a request.
struct Reply {
  bool shows;
  std::string text;
  std::vector<int32_t> tokens;
  mlcpipe_statistics statistics = Sized<mlcpipe_statistics>();
  int32_t code = MLCPIPE_OK;
  Clock::time_point first;  // when its first token came

  static int32_t OnText(void* context, const char* text, size_t bytes) {
    auto* reply = static_cast<Reply*>(context);
    reply->text.append(text, bytes);
    if (!reply->shows) return 0;
    const std::string shown = Printable({text, bytes});
    // Where stdout has no reader any more, the answer ends.
    return std::fwrite(shown.data(), 1, shown.size(), stdout) != shown.size() || std::fflush(stdout);
  }
  static int32_t OnToken(void* context, int32_t token) {
    auto* reply = static_cast<Reply*>(context);
    if (reply->tokens.empty()) reply->first = Clock::now();
    reply->tokens.push_back(token);
    return 0;
  }
};

class Session {
 public:
  Session(const Arguments& arguments, bool chats)
      : arguments_(arguments), interrupts_(chats) {
    const mlcpipe_options options = OptionsOf(arguments);
    Check(mlcpipe_open(arguments.model.c_str(), &options, &engine_));
    auto defaults = Sized<mlcpipe_sampling>();
    mlcpipe_default_sampling(&defaults);
    sampling_ = SamplingOf(arguments, StatedSampling(arguments.model, defaults));
    Reset();
    if (arguments.session.empty()) return;
    const bool found = access(arguments.session.c_str(), F_OK) == 0;  // else the file is tried before the chat begins
    Require(found ? Load(arguments.session) : Save(arguments.session));
    if (!arguments.system) return;
    if (!messages_.empty() && messages_[0].role == "system") messages_.erase(messages_.begin());
    messages_.insert(messages_.begin(), {"system", *arguments.system});
  }
  ~Session() { mlcpipe_close(engine_); }

  void Reset() {
    messages_.clear();
    if (arguments_.system) messages_.push_back({"system", *arguments_.system});
  }

  // Before the model was opened.
  Clock::time_point began() const { return began_; }

  // Both return what went wrong in one line, or "".
  std::string Save(const std::string& path) {
    const std::string json = SavedJson(messages_);
    return mlcpipe_save(engine_, path.c_str(), {json.data(), json.size()}) == MLCPIPE_OK ? "" : LastError();
  }
  std::string Load(const std::string& path) {
    std::string json;
    const auto keep = [](void* context, const char* text, size_t bytes) {
      static_cast<std::string*>(context)->assign(text, bytes);
      return 0;
    };
    if (mlcpipe_restore(engine_, path.c_str(), keep, &json) != MLCPIPE_OK) return LastError();
    auto messages = SavedMessages(json);
    if (!messages) return "the saved chat has no messages in " + path;
    messages_ = std::move(*messages);
    return "";
  }

  // Saves the chat where the arguments say so.
  void End() {
    if (!arguments_.session.empty()) Require(Save(arguments_.session));
  }

  // Answers, and keeps both for the next turn. An answer that fails leaves the chat as it was.
  Reply Ask(const std::string& prompt) {
    messages_.push_back({"user", prompt});
    Reply reply = arguments_.raw ? Answer(prompt, "") : Answer("", JsonOf(messages_));
    if (reply.code == MLCPIPE_OK || reply.code == MLCPIPE_CANCELLED) {
      messages_.push_back({"assistant", reply.text});
    } else {
      messages_.pop_back();
    }
    return reply;
  }

 private:
  const Clock::time_point began_ = Clock::now();
  const Arguments& arguments_;
  Interrupts interrupts_;
  mlcpipe_sampling sampling_;
  mlcpipe_engine engine_ = 0;
  std::vector<Message> messages_;

  static void Require(const std::string& error) {
    if (!error.empty()) Fail(error);
  }

  Reply Answer(const std::string& text, const std::string& messages) {
    Reply reply{};
    reply.shows = !arguments_.json;
    auto request = Sized<mlcpipe_request>();
    request.max_tokens = arguments_.max_tokens;
    request.sampling = &sampling_;
    request.on_token = Reply::OnToken;
    request.on_text = Reply::OnText;
    request.context = &reply;
    request.text = {text.data(), text.size()};
    request.messages = {messages.data(), messages.size()};
    interrupts_.Begin(engine_);
    reply.code = mlcpipe_generate(engine_, &request, &reply.statistics);
    interrupts_.End();
    return reply;
  }
};

void PrintJson(const Reply& reply, Clock::time_point began) {
  const mlcpipe_statistics& statistics = reply.statistics;
  std::string ids;
  for (int32_t token : reply.tokens) ids += (ids.empty() ? "" : ", ") + std::to_string(token);
  std::printf("{\"text\": %s, \"token_ids\": [%s], \"finish_reason\": \"%s\", \"prompt_tokens\": %" PRId64
              ", \"load_s\": %.6f, \"prefill_s\": %.6f, \"decode_s\": %.6f, \"first_token_s\": %.6f}\n",
              JsonText(reply.text).c_str(), ids.c_str(), statistics.finish == MLCPIPE_STOP ? "stop" : "length",
              statistics.prompt_tokens, statistics.load_s, statistics.prefill_s, statistics.decode_s,
              std::chrono::duration<double>(reply.first - began).count());
}

int AnswerOnce(const Arguments& arguments, const std::string& prompt) {
  Session session(arguments, false);
  const Reply reply = session.Ask(prompt);
  if (reply.code == MLCPIPE_CANCELLED) return kInterrupted;
  Check(reply.code);
  if (arguments.json) {
    PrintJson(reply, session.began());
  } else {
    std::puts("");
  }
  session.End();
  return 0;
}

// The file in a line with this command; "" for another line.
std::string FileOf(const std::string& line, const std::string& command) {
  return line.rfind(command + " ", 0) == 0 ? line.substr(command.size() + 1) : "";
}

void Say(const std::string& error, const char* done) {
  if (error.empty()) {
    std::puts(done);
  } else {
    std::fprintf(stderr, "error: %s\n", Printable(error).c_str());
  }
}

std::string ReadAll() {
  std::string text((std::istreambuf_iterator<char>(std::cin)), std::istreambuf_iterator<char>());
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.pop_back();
  return text;
}

}  // namespace

int Chat(const Arguments& arguments) {
  if (arguments.prompt) return AnswerOnce(arguments, *arguments.prompt);
  if (!isatty(STDIN_FILENO)) {
    const std::string prompt = ReadAll();
    if (prompt.empty()) Fail("no prompt; expected -p TEXT, a text to read, or a terminal");
    return AnswerOnce(arguments, prompt);
  }
  Session session(arguments, true);
  std::puts("/reset forgets the chat, /save FILE keeps it, /load FILE continues it, Ctrl-C ends an answer, Ctrl-D the program");
  for (std::string line; std::printf("> "), std::fflush(stdout), std::getline(std::cin, line);) {
    if (line.empty()) continue;
    if (line == "/reset") {
      session.Reset();
      continue;
    }
    if (const std::string file = FileOf(line, "/save"); !file.empty()) {
      Say(session.Save(file), "saved");
      continue;
    }
    if (const std::string file = FileOf(line, "/load"); !file.empty()) {
      Say(session.Load(file), "loaded");
      continue;
    }
    const Reply reply = session.Ask(line);
    if (reply.code == MLCPIPE_OK || reply.code == MLCPIPE_CANCELLED) {
      std::puts("");
    } else {
      Say(LastError(), "");
    }
  }
  std::puts("");
  session.End();
  return 0;
}

}  // namespace mlcpipe::cli
