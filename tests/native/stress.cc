// DATA_A DATA_B ROUNDS: engines of two models that are used, cancelled and closed from several threads at once.
#include <mlcpipe.h>
#include <mlcpipe_models.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <random>
#include <thread>
#include <vector>

namespace {

std::mt19937 draw(7);

struct Model {
  const char* data;
  const mlcpipe_symbol* code;
};

void Require(int32_t found, std::initializer_list<int32_t> expected, const char* what) {
  for (int32_t code : expected) {
    if (found == code) return;
  }
  mlcpipe_error error{};
  error.size = sizeof error;
  mlcpipe_last_error(&error);
  std::fprintf(stderr, "%s gave %d: %s\n", what, found, error.line);
  std::abort();
}

mlcpipe_engine Open(const Model& model, int64_t sequences = 0) {
  mlcpipe_options options{};
  options.size = sizeof options;
  options.context_length = 256;
  options.threads = 2;
  options.code = model.code;
  options.sequences = sequences;
  mlcpipe_engine engine = 0;
  Require(mlcpipe_open(model.data, &options, &engine), {MLCPIPE_OK}, "open");
  return engine;
}

int32_t Keep(void* context, int32_t token) {
  static_cast<std::vector<int32_t>*>(context)->push_back(token);
  return 0;
}

// Has `call` ask for the tokens of an answer.
template <typename Call>
int32_t Ask(size_t prompt_tokens, int64_t max_tokens, void* context, Call call) {
  std::vector<int32_t> prompt;
  for (size_t i = 0; i < prompt_tokens; ++i) prompt.push_back(static_cast<int32_t>(i * 37 % 250));
  mlcpipe_sampling sampling{};
  sampling.size = sizeof sampling;
  mlcpipe_default_sampling(&sampling);
  mlcpipe_request request{};
  request.size = sizeof request;
  request.prompt = prompt.data();
  request.prompt_count = prompt.size();
  request.max_tokens = max_tokens;
  request.sampling = &sampling;
  request.on_token = Keep;
  request.context = context;
  request.deterministic = 1;
  return call(request);
}

int32_t Generate(mlcpipe_engine engine, size_t prompt_tokens, int64_t max_tokens, std::vector<int32_t>* tokens) {
  return Ask(prompt_tokens, max_tokens, tokens, [engine](const mlcpipe_request& request) {
    mlcpipe_statistics statistics{};
    statistics.size = sizeof statistics;
    return mlcpipe_generate(engine, &request, &statistics);
  });
}

void SleepUs(int64_t most) {
  std::this_thread::sleep_for(std::chrono::microseconds(draw() % static_cast<unsigned>(most)));
}

// While mlcpipe_trim uses the engine.
template <typename Call>
void Again(Call call) {
  int32_t code = MLCPIPE_USAGE;
  while (code == MLCPIPE_USAGE) code = call();
  Require(code, {MLCPIPE_OK}, "a call");
}

// Both answer as they do alone, while the main thread does all that it may.
void AnswerTogether(const mlcpipe_engine (&engines)[2], const std::vector<int32_t> (&expected)[2]) {
  std::atomic<int> running{2};
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&, i] {
      for (int turn = 0; turn < 3; ++turn) {
        std::vector<int32_t> tokens;
        Again([&] { return mlcpipe_reset(engines[i]); });
        Again([&] { return Generate(engines[i], 40, 20, &tokens); });
        Require(tokens == expected[i] ? MLCPIPE_OK : MLCPIPE_INTERNAL, {MLCPIPE_OK}, "the answer");
      }
      --running;
    });
  }
  for (int turn = 0; running; ++turn) {
    const mlcpipe_engine engine = engines[turn % 2];
    Require(mlcpipe_set_threads(1 + turn % 3), {MLCPIPE_OK}, "set_threads");
    Require(mlcpipe_trim(engine), {MLCPIPE_OK, MLCPIPE_USAGE}, "trim");
    int32_t ids[64];
    size_t count = 0;
    Require(mlcpipe_tokenize(engine, {"some words", 10}, 1, ids, 64, &count), {MLCPIPE_OK}, "tokenize");
    SleepUs(2000);
  }
  for (std::thread& thread : threads) thread.join();
}

void CancelFromAnotherThread(mlcpipe_engine engine) {
  std::thread worker([&] {
    std::vector<int32_t> tokens;
    Require(Generate(engine, 200, 50, &tokens), {MLCPIPE_OK, MLCPIPE_CANCELLED}, "a cancelled answer");
  });
  SleepUs(30000);
  Require(mlcpipe_cancel(engine), {MLCPIPE_OK}, "cancel");
  worker.join();
  Require(mlcpipe_reset(engine), {MLCPIPE_OK}, "reset");
}

// Often just when the answer begins. It must not continue.
void CloseWhileItAnswers(const Model& model, int64_t most_us) {
  const mlcpipe_engine engine = Open(model);
  std::thread worker([&] {
    std::vector<int32_t> tokens;
    Require(Generate(engine, 8, 240, &tokens), {MLCPIPE_CANCELLED, MLCPIPE_USAGE}, "a closed answer");
  });
  SleepUs(most_us);
  Require(mlcpipe_close(engine), {MLCPIPE_OK}, "close");
  Require(mlcpipe_cancel(engine), {MLCPIPE_USAGE}, "cancel after close");
  worker.join();
}

void ShareAnEngine(mlcpipe_engine engine) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      for (int turn = 0; turn < 5; ++turn) {
        std::vector<int32_t> tokens;
        Require(Generate(engine, 8, 4, &tokens), {MLCPIPE_OK, MLCPIPE_USAGE}, "a shared engine");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void OpenAtTheSameTime(const Model (&models)[2]) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      const mlcpipe_engine engine = Open(models[i % 2]);
      std::vector<int32_t> tokens;
      Require(Generate(engine, 8, 4, &tokens), {MLCPIPE_OK}, "generate");
      Require(mlcpipe_close(engine), {MLCPIPE_OK}, "close");
    });
  }
  for (std::thread& thread : threads) thread.join();
}

struct Answer {
  std::vector<int32_t> tokens;  // first: it is the context of `Keep`
  std::atomic<int> code{-1};
};

void End(void* context, int32_t code, const mlcpipe_statistics*) { static_cast<Answer*>(context)->code = code; }

// Clients submit and cancel while one thread steps; answers that are not cancelled are those alone. The last ones are
// running when the engine is closed.
void AnswerSeveralAtOnce(const Model& model, const std::vector<int32_t>& expected) {
  const mlcpipe_engine engine = Open(model, 3);
  std::atomic<bool> closed{false};
  std::thread stepper([&] {
    size_t left = 0;
    while (!closed) Require(mlcpipe_step(engine, &left), {MLCPIPE_OK, MLCPIPE_CANCELLED, MLCPIPE_USAGE}, "step");
  });
  const auto submit = [engine](Answer* answer, int64_t max_tokens, int32_t priority = 0) {
    mlcpipe_answer number = 0;
    const auto call = [&](mlcpipe_request request) {
      request.priority = priority;
      return mlcpipe_submit(engine, &request, End, &number);
    };
    Require(Ask(40, max_tokens, answer, call), {MLCPIPE_OK}, "submit");
    return number;
  };
  std::vector<std::thread> clients;
  for (int client = 0; client < 4; ++client) {
    clients.emplace_back([&, client] {
      for (int turn = 0; turn < 3; ++turn) {
        Answer answer;
        const bool cancels = client == turn;
        const mlcpipe_answer number = submit(&answer, 20, client % 3 - 1);
        if (cancels) Require(mlcpipe_cancel_answer(engine, number), {MLCPIPE_OK}, "cancel_answer");
        while (answer.code < 0) std::this_thread::yield();
        if (cancels && answer.code == MLCPIPE_CANCELLED) continue;
        Require(answer.code, {MLCPIPE_OK}, "an answer among several");
        Require(answer.tokens == expected ? MLCPIPE_OK : MLCPIPE_INTERNAL, {MLCPIPE_OK}, "its tokens");
      }
    });
  }
  for (std::thread& client : clients) client.join();
  Answer last[4];
  for (Answer& answer : last) submit(&answer, 200);
  SleepUs(3000);
  Require(mlcpipe_close(engine), {MLCPIPE_OK}, "close");
  closed = true;
  stepper.join();
}

}  // namespace

int main(int, char** words) {
  const Model models[2] = {{words[1], MLCPIPE_CODE_CHAT}, {words[2], MLCPIPE_CODE_TINY_MODEL}};
  OpenAtTheSameTime(models);
  const mlcpipe_engine engines[2] = {Open(models[0]), Open(models[1])};
  std::vector<int32_t> expected[2];
  for (int i = 0; i < 2; ++i) Require(Generate(engines[i], 40, 20, &expected[i]), {MLCPIPE_OK}, "generate");
  for (int round = 0; round < std::atoi(words[3]); ++round) {
    AnswerTogether(engines, expected);
    CancelFromAnotherThread(engines[round % 2]);
    for (int64_t most_us : {50, 100, 300, 3000}) CloseWhileItAnswers(models[round % 2], most_us);
    ShareAnEngine(engines[round % 2]);
    AnswerSeveralAtOnce(models[round % 2], expected[round % 2]);
  }
  for (mlcpipe_engine engine : engines) Require(mlcpipe_close(engine), {MLCPIPE_OK}, "close");
  std::puts("done");
  return 0;
}
