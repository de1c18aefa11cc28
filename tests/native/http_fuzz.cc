// Changes requests of HTTP and reads them, in parts of any size; with MLCPIPE_BODIES also what they ask for.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>

#include "cli/http.h"
#include "cli/openai.h"

namespace {

using mlcpipe::cli::ApiError;
using mlcpipe::cli::HttpReader;
using mlcpipe::cli::HttpRequest;

constexpr const char* kWords[] = {
    "\r\n", "\r\n\r\n", "\n", "\r", " ", "\t", ":", ",", "%", "%00", "?", "HTTP/1.1", "HTTP/1.0", "GET ", "POST ", "/",
    "Host: x\r\n", "Content-Length: 5\r\n", "content-length: 0\r\n", "Content-Length: 99999999999999999999\r\n",
    "Transfer-Encoding: chunked\r\n", "transfer-encoding: gzip\r\n", "Connection: close\r\n", "0\r\n\r\n", "5\r\nhello\r\n",
    "ffffffff\r\n", "0x5\r\n", "-1", "+5", "{", "}", "[", "]", "\"", "\\u", "\\ud800", "null", "true", "1e999", "-0", "9223372036854775807",
    "\"messages\":", "\"content\":", "\"tools\":", "\"arguments\":", "\"{}\"", "\xff", "\xc3\xa9"};

void Require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "broken: %s\n", what);
  std::abort();
}

// What a server asks of a body; returns whether it can be answered.
bool UseBody([[maybe_unused]] const HttpRequest& request) {
#ifdef MLCPIPE_BODIES
  mlcpipe::cli::Served served;
  served.names = {"m", "*"};
  served.sampling = {};
  int good = 0;
  for (auto* read : {mlcpipe::cli::ReadChatBody, mlcpipe::cli::ReadCompletionBody}) {
    try {
      const mlcpipe::cli::Body body = read(request.body, served);
      Require(body.chat ? !body.messages.empty() : !body.text.empty(), "a body without a prompt");
      Require(body.stops.size() <= 16 && body.bias_tokens.size() == body.biases.size(), "a body over its limits");
      ++good;
    } catch (const ApiError& error) {
      Require((error.status == 400 || error.status == 404) && !error.Json().empty(), "a status of a body");
    }
  }
  return good != 0;
#else
  return true;
#endif
}

struct Outcome {
  std::string text;  // of all requests, and of the refusal that ended them
  int requests = 0, bodies = 0;
};

// Reads all requests of `data`, which comes in parts of up to `most` bytes.
Outcome ReadAll(const std::string& data, size_t most, std::mt19937* draw) {
  size_t at = 0;
  HttpReader reader([&](char* to, size_t bytes) {
    const size_t count = std::min({bytes, data.size() - at, most ? 1 + (*draw)() % most : bytes});
    data.copy(to, count, at);
    at += count;
    return count;
  });
  Outcome outcome;
  try {
    for (HttpRequest request; reader.ReadHead(&request); ++outcome.requests) {
      reader.ReadBody(&request);
      Require(request.headers.size() <= HttpReader::kMaxHeaders && request.body.size() <= HttpReader::kMaxBodyBytes &&
                  request.target.size() <= HttpReader::kMaxLineBytes && !request.path.empty(),
              "a request over its limits");
      for (char c : request.target) Require(c > 32 && c < 127, "a target with control characters");
      outcome.text += request.method + " " + request.path + "\n" + request.body + "\n";
      outcome.bodies += !most && UseBody(request);
    }
  } catch (const ApiError& error) {
    Require(error.status >= 400 && error.status <= 505 && !error.Json().empty(), "a status");
    outcome.text += std::to_string(error.status);
  }
  return outcome;
}

void Change(std::mt19937* draw, std::string* data) {
  for (uint32_t left = 1 + (*draw)() % 4; left > 0; --left) {
    const size_t at = (*draw)() % (data->size() + 1), length = (*draw)() % 40;
    switch ((*draw)() % 6) {
      case 0:
        if (at < data->size()) (*data)[at] = static_cast<char>((*draw)());
        break;
      case 1:
        data->erase(at, length);
        break;
      case 2:
        data->insert(at, data->substr((*draw)() % (data->size() + 1), length));
        break;
      case 3:
        data->insert(at, std::string(1 + (*draw)() % 40'000, "a{[\r0 "[(*draw)() % 6]));
        break;
      default:
        data->insert(at, kWords[(*draw)() % std::size(kWords)]);
    }
  }
}

}  // namespace

// COUNT SEED FILE...: changes each file COUNT times; prints how many requests, refusals and good bodies there were.
int main(int, char** arguments) {
  std::mt19937 draw(static_cast<uint32_t>(std::atoi(arguments[2])));
  long requests = 0, refusals = 0, bodies = 0;
  for (char** path = arguments + 3; *path; ++path) {
    std::ifstream stream(*path, std::ios::binary);
    const std::string file{std::istreambuf_iterator<char>(stream), {}};
    for (long left = std::atol(arguments[1]); left >= 0; --left) {
      std::string data = file;
      if (left) Change(&draw, &data);
      const Outcome whole = ReadAll(data, 0, &draw), parts = ReadAll(data, left % 2 ? 3 : 2000, &draw);
      Require(whole.text == parts.text, "what is read depends on the parts in which it comes");
      requests += whole.requests;
      bodies += whole.bodies;
      refusals += whole.text.empty() || whole.text.back() != '\n';
    }
  }
  std::printf("%ld %ld %ld\n", requests, refusals, bodies);
  return 0;
}
