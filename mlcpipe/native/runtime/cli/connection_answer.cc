#include <poll.h>
#include <sys/eventfd.h>

#include <cstdio>

#include "cli/arguments.h"
#include "cli/connection.h"

namespace mlcpipe::cli {
namespace {

constexpr int kPingMs = 15'000;  // of silence
constexpr char kDone[] = "data: [DONE]\n\n";

std::string Event(const std::string& json) { return json.empty() ? "" : "data: " + json + "\n\n"; }

mlcpipe_text TextOf(const std::string& text) { return {text.data(), text.size()}; }

void Checked(int32_t code) {
  if (code != MLCPIPE_OK) throw LastRefusal();
}

}  // namespace

std::string Connection::Rendered(const Body& body, const std::string& variables) const {
  const mlcpipe_text messages = TextOf(body.messages), more = TextOf(variables);
  std::string text(body.messages.size() + variables.size() + 4096, '\0');
  size_t bytes = 0;
  Checked(mlcpipe_render(site_.engine, messages, more, text.data(), text.size(), &bytes));
  if (bytes > text.size()) {
    text.resize(bytes);
    Checked(mlcpipe_render(site_.engine, messages, more, text.data(), text.size(), &bytes));
  }
  text.resize(bytes);
  return text;
}

// Refuses a prompt without room for an answer, and tools that the template would not show. Returns how the answer begins.
ReasoningSplitter::State Connection::CheckPrompt(const Body& body) const {
  size_t count = 0;
  if (body.chat) {
    Checked(mlcpipe_tokenize_chat(site_.engine, TextOf(body.messages), TextOf(body.variables), nullptr, 0, &count));
  } else {
    Checked(mlcpipe_tokenize(site_.engine, TextOf(body.text), 1, nullptr, 0, &count));
  }
  const int64_t length = site_.served.context_length;
  if (static_cast<int64_t>(count) >= length) {
    throw ApiError{400, "This model's maximum context length is " + std::to_string(length) +
                            " tokens, and the prompt has " + std::to_string(count) + "; shorten it",
                   "context_length_exceeded", ""};
  }
  const bool thinks = body.chat && site_.served.thinks, has_tools = !body.without_tools.empty();
  if (!thinks && !has_tools) return ReasoningSplitter::kAnswer;
  std::string prompt = Rendered(body, body.variables);
  if (has_tools && prompt == Rendered(body, body.without_tools)) {
    throw ApiError{400, "tools: not supported by the model's chat template", "unsupported_parameter", "tools"};
  }
  if (!thinks) return ReasoningSplitter::kAnswer;
  prompt.resize(prompt.find_last_not_of(" \t\r\n") + 1);
  const std::string_view begin = ReasoningSplitter::kBegin;
  const bool open = prompt.size() >= begin.size() && prompt.compare(prompt.size() - begin.size(), begin.size(), begin) == 0;
  return open ? ReasoningSplitter::kInside : ReasoningSplitter::kBefore;
}

void Connection::Answer(const HttpRequest& request, const Body& body) {
  Ticket ticket(site_.queue, body, CheckPrompt(body), wake_);
  if (body.stream) return Stream(request, body, &ticket);
  const AnswerJson json(body, site_.served);
  Delta whole;
  for (;;) {
    const News news = ticket.Take();
    if (news.error) throw *news.error;
    whole.text += news.delta.text;
    whole.reasoning += news.delta.reasoning;
    if (news.done) {
      tokens_ = news.usage.completion;
      return Respond(200, json.Whole(whole, news.stopped, news.usage), request.keep_alive);
    }
    WaitForNews();
  }
}

bool Connection::WaitForNews() const {
  pollfd ready[] = {{socket_, POLLRDHUP, 0}, {wake_, POLLIN, 0}};
  if (poll(ready, 2, kPingMs) == 0) return false;
  if (ready[0].revents) throw Gone();
  eventfd_t count;
  eventfd_read(wake_, &count);
  return true;
}

// The status goes out with the first event, so that what fails before it has a status of its own.
void Connection::Stream(const HttpRequest& request, const Body& body, Ticket* ticket) {
  const AnswerJson json(body, site_.served);
  bool lives = true;
  for (;;) {
    const News news = ticket->Take();
    if (news.error) {
      if (!status_) throw *news.error;
      return EndStream(request, Event(news.error->Json()) + kDone);
    }
    std::string events;
    if ((news.begun || !lives) && !status_) events = Event(json.Begin());
    if (!news.delta.text.empty() || !news.delta.reasoning.empty()) events += Event(json.Piece(news.delta));
    if (news.done) {
      tokens_ = news.usage.completion;
      events += Event(json.End(news.stopped));
      if (body.include_usage) events += Event(json.UsageAlone(news.usage));
      return EndStream(request, events + kDone);
    }
    if (!lives && events.empty()) events = ": ping\n\n";
    if (!events.empty()) SendEvents(request, events);
    lives = WaitForNews();
  }
}

void Connection::SendEvents(const HttpRequest& request, const std::string& events) {
  std::string data;
  if (!status_) {
    data = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
           "x-accel-buffering: no\r\n";
    data += request.chunked ? "transfer-encoding: chunked\r\n" : "";
    data += request.keep_alive ? "\r\n" : "connection: close\r\n\r\n";
  }
  char size[24] = "";
  if (request.chunked) std::snprintf(size, sizeof size, "%zx\r\n", events.size());
  data += size + events + (request.chunked ? "\r\n" : "");
  status_ = 200;  // after what may throw
  Send(data);
}

void Connection::EndStream(const HttpRequest& request, const std::string& events) {
  SendEvents(request, events);
  if (request.chunked) Send("0\r\n\r\n");
}

}  // namespace mlcpipe::cli
