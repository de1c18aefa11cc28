// BUNDLE TOKENS [SEQUENCES]: what a token of an answer costs in time and heap allocations, the runtime's own loop apart from
// TVM's virtual machine and the kernels. A line of JSON for each kind of answer. Needs glibc and libstdc++.
#include <bits/stdc++.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/runtime/c_backend_api.h>
#include <tvm/runtime/device_api.h>
#include <tvm/runtime/memory/memory_manager.h>
#include <tvm/runtime/tensor.h>

// The compiled functions that an engine calls are replaced by ones that are watched.
#define private public
#include "runtime.cc"
#undef private

namespace {

using Clock = std::chrono::steady_clock;
using tvm::ffi::Function;

struct Cost {
  double us = 0;
  int64_t allocations = 0;
};

// Of the thread that runs the loop.
thread_local bool counts = false, in_model = false;
thread_local int64_t own_allocations = 0, model_allocations = 0;
thread_local Clock::duration model_time{};

void CountAllocation() {
  if (counts) ++(in_model ? model_allocations : own_allocations);
}

class InModel {
 public:
  InModel() { in_model = true; }
  ~InModel() {
    in_model = false;
    model_time += Clock::now() - began_;
  }

 private:
  const Clock::time_point began_ = Clock::now();
};

void Watch(Function* function) {
  *function = Function::FromPacked([inner = *function](tvm::ffi::PackedArgs arguments, tvm::ffi::Any* result) {
    const InModel in_model_now;
    inner.CallPacked(arguments, result);
  });
}

void Watch(mlcpipe::Sampler* sampler) {
  for (Function* one : {&sampler->sample_, &sampler->penalize_, &sampler->add_bias_}) Watch(one);
}

template <typename Model>
void Watch(Model* model) {
  for (Function* one : {&model->decode_, &model->prefill_}) Watch(one);
  Watch(&model->sampler_);
}

// What is between the first of an answer's tokens that count and the last.
class Meter {
 public:
  explicit Meter(int64_t tokens) : tokens_(tokens) {
    own_us_.reserve(static_cast<size_t>(tokens));
    model_us_.reserve(static_cast<size_t>(tokens));
  }

  static int32_t OnToken(void* meter, int32_t) {
    static_cast<Meter*>(meter)->Add();
    return 0;
  }

  Cost own() const { return {Median(own_us_), own_count_}; }
  Cost model() const { return {Median(model_us_), model_count_}; }

 private:
  static constexpr int64_t kWarm = 8;  // tokens before

  const int64_t tokens_;
  int64_t seen_ = 0, own_count_ = -1, model_count_ = -1;
  Clock::time_point last_;
  std::vector<double> own_us_, model_us_;

  void Add() {
    const auto now = Clock::now();
    if (seen_ > kWarm && seen_ <= kWarm + tokens_) {
      const std::chrono::duration<double, std::micro> all = now - last_, model = model_time;
      own_us_.push_back((all - model).count());
      model_us_.push_back(model.count());
    }
    if (seen_ == kWarm) {
      own_allocations = model_allocations = 0;
      counts = true;
    } else if (seen_ == kWarm + tokens_) {
      counts = false;
      own_count_ = own_allocations;
      model_count_ = model_allocations;
    }
    ++seen_;
    model_time = {};
    last_ = Clock::now();
  }

  static double Median(std::vector<double> numbers) {
    const auto middle = numbers.begin() + static_cast<std::ptrdiff_t>(numbers.size() / 2);
    std::nth_element(numbers.begin(), middle, numbers.end());
    return *middle;
  }
};

void Check(int32_t code) {
  if (code == MLCPIPE_OK) return;
  mlcpipe_error error{};
  error.size = sizeof error;
  mlcpipe_last_error(&error);
  std::fprintf(stderr, "%s\n", error.line);
  std::exit(1);
}

mlcpipe_engine Open(const char* bundle, int64_t sequences) {
  mlcpipe_options options{};
  options.size = sizeof options;
  options.context_length = 512;
  options.sequences = sequences;
  mlcpipe_engine engine = 0;
  Check(mlcpipe_open(bundle, &options, &engine));
  const auto opened = Engines::Global().Get(engine);
  if (sequences) {
    Watch(&*opened->batch_);
  } else {
    Watch(&*opened->model_);
  }
  return engine;
}

int32_t OnText(void*, const char*, size_t) { return 0; }

constexpr int64_t kMore = 32;  // tokens that do not count

mlcpipe_request RequestOf(const std::vector<int32_t>& prompt, const mlcpipe_sampling* sampling, int64_t tokens) {
  mlcpipe_request request{};
  request.size = sizeof request;
  request.prompt = prompt.data();
  request.prompt_count = prompt.size();
  request.max_tokens = tokens + kMore;
  request.sampling = sampling;
  request.on_token = Meter::OnToken;
  request.on_text = OnText;
  return request;
}

void Print(const char* answer, int64_t tokens, const Meter& meter) {
  const Cost own = meter.own(), model = meter.model();
  const auto count = static_cast<double>(tokens);
  std::printf("{\"answer\": \"%s\", \"own_us\": %.2f, \"own_allocations\": %.3f, \"model_us\": %.2f, "
              "\"model_allocations\": %.3f}\n",
              answer, own.us, static_cast<double>(own.allocations) / count, model.us,
              static_cast<double>(model.allocations) / count);
}

// An answer of an engine that answers one at a time.
void One(const char* bundle, const char* name, const mlcpipe_sampling& sampling, int64_t tokens) {
  const mlcpipe_engine engine = Open(bundle, 0);
  Meter meter(tokens);
  const std::vector<int32_t> prompt{1, 2, 3, 4};
  mlcpipe_request request = RequestOf(prompt, &sampling, tokens);
  request.context = &meter;
  mlcpipe_statistics statistics{};
  statistics.size = sizeof statistics;
  Check(mlcpipe_generate(engine, &request, &statistics));
  Check(mlcpipe_close(engine));
  Print(name, tokens, meter);
}

void OnEnd(void*, int32_t code, const mlcpipe_statistics*) { Check(code); }

// Steps of so many answers at once; the figures are a step's, which gives a token to each.
void Several(const char* bundle, const mlcpipe_sampling& sampling, int64_t tokens, int64_t sequences) {
  const mlcpipe_engine engine = Open(bundle, sequences);
  Meter meter(tokens);
  for (int64_t i = 0; i < sequences; ++i) {
    const std::vector<int32_t> prompt{1, 2, 3, 4, static_cast<int32_t>(5 + i)};
    mlcpipe_request request = RequestOf(prompt, &sampling, tokens);
    if (i) request.on_token = nullptr;
    request.context = &meter;
    mlcpipe_answer number = 0;
    Check(mlcpipe_submit(engine, &request, OnEnd, &number));
  }
  for (size_t left = 1; left;) Check(mlcpipe_step(engine, &left));
  Check(mlcpipe_close(engine));
  Print(("a step of " + std::to_string(sequences)).c_str(), tokens, meter);
}

}  // namespace

// glibc's own functions below their names; `new` calls malloc.
#pragma GCC visibility push(default)
extern "C" {
void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_realloc(void* data, size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);

void* malloc(size_t bytes) {
  CountAllocation();
  return __libc_malloc(bytes);
}
void* calloc(size_t count, size_t bytes) {
  CountAllocation();
  return __libc_calloc(count, bytes);
}
void* realloc(void* data, size_t bytes) {
  CountAllocation();
  return __libc_realloc(data, bytes);
}
void* aligned_alloc(size_t alignment, size_t bytes) {
  CountAllocation();
  return __libc_memalign(alignment, bytes);
}
int posix_memalign(void** data, size_t alignment, size_t bytes) {
  CountAllocation();
  *data = __libc_memalign(alignment, bytes);
  return *data ? 0 : ENOMEM;
}
}
#pragma GCC visibility pop

int main(int, char** words) {
  const int64_t tokens = std::atoll(words[2]);
  mlcpipe_sampling greedy{};
  greedy.size = sizeof greedy;
  mlcpipe_default_sampling(&greedy);
  mlcpipe_sampling drawn = greedy;
  greedy.temperature = 0;
  One(words[1], "greedy", greedy, tokens);
  const int32_t biased = 7;
  const double bias = -1;
  drawn.bias_tokens = &biased;
  drawn.biases = &bias;
  drawn.bias_count = 1;
  drawn.repetition_penalty = 1.1;
  drawn.presence_penalty = 0.1;
  One(words[1], "drawn, with penalties and a bias", drawn, tokens);
  for (char** word = words + 3; *word; ++word) Several(words[1], greedy, tokens, std::atoll(*word));
  return 0;
}
