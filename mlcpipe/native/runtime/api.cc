// The C API: handles to engines, structs with sizes, and errors as codes.
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>

#include "answer.h"
#include "faster.h"
#include "metal.h"
#include "pool.h"

using mlcpipe::Answer;
using mlcpipe::Code;
using mlcpipe::Engine;
using mlcpipe::Error;
using mlcpipe::Give;
using mlcpipe::GiveAll;
using mlcpipe::Ids;
using mlcpipe::OptionsOf;
using mlcpipe::Required;
using mlcpipe::Taken;
using mlcpipe::ViewOf;

namespace {

const Error none(Code::kInternal, "no call of this thread has failed");
const Error no_memory(Code::kResource, "the system gives no more memory");
thread_local std::optional<Error> own_error;  // takes no memory at first
thread_local const Error* last_error = &none;

int32_t Keep(const Error& error) {
  const Code code = error.code;
  last_error = &no_memory;
  try {
    own_error = error;
    last_error = &*own_error;
  } catch (const std::bad_alloc&) {
  }
  return static_cast<int32_t>(code);
}

// MLCPIPE_OK, or the code of what a call threw.
template <typename Call>
int32_t Guarded(Call call) {
  try {
    try {
      call();
      return MLCPIPE_OK;
    } catch (const Error& error) {
      return Keep(error);
    } catch (const tvm::ffi::Error& error) {
      return Keep(mlcpipe::FromTvm(error, Code::kInternal, "the runtime failed"));
    } catch (const std::bad_alloc&) {
      return Keep(no_memory);
    } catch (const std::exception& error) {
      return Keep(Error(Code::kInternal, "the runtime failed").Found(error.what()));
    }
  } catch (const std::bad_alloc&) {  // not even for the words of the error
    return Keep(no_memory);
  }
}

// The engines that are open. A call keeps its engine, so that another thread may close it meanwhile.
class Engines {
 public:
  static Engines& Global() {
    static auto* const engines = new Engines();
    return *engines;
  }

  uint64_t Add(std::shared_ptr<Engine> engine) {
    const std::lock_guard<std::mutex> lock(mutex_);
    open_[++last_] = std::move(engine);
    return last_;
  }

  std::shared_ptr<Engine> Get(uint64_t handle) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return Find(handle)->second;
  }

  std::shared_ptr<Engine> Remove(uint64_t handle) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = Find(handle);
    auto engine = std::move(found->second);
    open_.erase(found);
    return engine;
  }

 private:
  std::mutex mutex_;
  std::map<uint64_t, std::shared_ptr<Engine>> open_;
  uint64_t last_ = 0;

  std::map<uint64_t, std::shared_ptr<Engine>>::iterator Find(uint64_t handle) {
    const auto found = open_.find(handle);
    if (found == open_.end()) throw Error(Code::kUsage, "no such engine").Found("one that is closed, or none");
    return found;
  }
};

template <typename Files>
void OpenEngine(Files files, const mlcpipe_options* options, mlcpipe_engine* engine) {
  Required(engine, "engine");
  *engine = 0;
  const Engine::Options taken = OptionsOf(options);
  const bool measure = taken.device == "auto" && !taken.gpu_path.empty();
  *engine = Engines::Global().Add(measure ? mlcpipe::OpenFaster(files, taken.gpu_path, taken)
                                          : std::make_shared<Engine>(files(), taken));
}

void GiveStatistics(const mlcpipe::Statistics& from, int32_t finish, mlcpipe_statistics* to) {
  if (!to) return;
  Give({0, finish, from.prompt_tokens, from.cached_tokens, from.completion_tokens, from.decode_bytes, from.load_s,
        from.prefill_s, from.decode_s, from.miss.reason, from.miss.token,
        from.drafted_tokens, from.accepted_tokens},
       to);
}

}  // namespace

void mlcpipe_last_error(mlcpipe_error* error) {
  const Error& last = *last_error;
  Guarded([&] {
    Give({0, static_cast<int32_t>(last.code), last.what(), last.what_failed.c_str(), last.where.c_str(),
          last.expected.c_str(), last.found.c_str(), last.next_step.c_str()},
         error);
  });
}

int32_t mlcpipe_plan(const char* path, const mlcpipe_options* options, mlcpipe_plan_info* result) {
  return Guarded([&] {
    const Engine::Options taken = OptionsOf(options);
    const auto files = mlcpipe::Files::At(Required(path, "path"));
    const mlcpipe::Manifest manifest(*files);
    const mlcpipe::Device device = mlcpipe::ChooseDevice(manifest, taken.device, taken.cache);
    const mlcpipe::VariantInfo& variant = mlcpipe::ChooseVariant(manifest, taken.variant);
    const mlcpipe::Plan plan(manifest, variant, taken, device.Free());
    Give({0, plan.weights_bytes, plan.kv_bytes, plan.workspace_bytes, plan.free.bytes, plan.context_length, plan.Fits()},
         result);
  });
}

int32_t mlcpipe_open(const char* path, const mlcpipe_options* options, mlcpipe_engine* engine) {
  return Guarded([&] { OpenEngine([&] { return mlcpipe::Files::At(Required(path, "path")); }, options, engine); });
}

int32_t mlcpipe_open_descriptor(int32_t descriptor, uint64_t offset, uint64_t bytes, const mlcpipe_options* options,
                                mlcpipe_engine* engine) {
  return Guarded([&] { OpenEngine([&] { return mlcpipe::Files::In(descriptor, offset, bytes); }, options, engine); });
}

int32_t mlcpipe_close(mlcpipe_engine engine) {
  return Guarded([&] { Engines::Global().Remove(engine)->Close(); });
}

int32_t mlcpipe_info(mlcpipe_engine engine, mlcpipe_engine_info* info) {
  return Guarded([&] {
    const auto open = Engines::Global().Get(engine);
    Give({0, open->manifest().model.vocab_size, open->plan().context_length, open->variant().c_str(),
          mlcpipe_pool_threads(0, 0), open->device().kind.c_str(), open->device().title.c_str()},
         info);
  });
}

void mlcpipe_default_sampling(mlcpipe_sampling* sampling) {
  const mlcpipe::Sampling defaults;
  Guarded([&] {
    Give({0, defaults.temperature, defaults.top_p, defaults.min_p, defaults.top_k, defaults.repetition_penalty,
          defaults.presence_penalty, defaults.frequency_penalty, nullptr, nullptr, 0, defaults.seed},
         sampling);
  });
}

int32_t mlcpipe_generate(mlcpipe_engine engine, const mlcpipe_request* given, mlcpipe_statistics* statistics) {
  return Guarded([&] {
    const auto open = Engines::Global().Get(engine);
    const mlcpipe_request taken = Taken(Required(given, "request"), {});
    Answer answer(open.get(), taken);
    try {
      const mlcpipe::Finish finish = answer.Generate();
      GiveStatistics(answer.statistics(), static_cast<int32_t>(finish), statistics);
    } catch (const Error& error) {
      if (error.code == Code::kCancelled) GiveStatistics(answer.statistics(), 0, statistics);
      throw;
    }
  });
}

int32_t mlcpipe_submit(mlcpipe_engine engine, const mlcpipe_request* given, mlcpipe_on_end on_end,
                       mlcpipe_answer* number) {
  return Guarded([&] {
    const auto open = Engines::Global().Get(engine);
    const mlcpipe_request taken = Taken(Required(given, "request"), {});
    Required(on_end, "on_end");
    Required(number, "answer");
    const auto answer = std::make_shared<Answer>(open.get(), taken);
    *number = Answer::Submit(answer, [on_end, context = taken.context](const mlcpipe::Statistics& from,
                                                                       std::optional<mlcpipe::Finish> finish,
                                                                       const Error* error) {
      mlcpipe_statistics statistics{};
      statistics.size = sizeof statistics;
      GiveStatistics(from, finish ? static_cast<int32_t>(*finish) : 0, &statistics);
      on_end(context, error ? Keep(*error) : MLCPIPE_OK, &statistics);
    });
  });
}

int32_t mlcpipe_step(mlcpipe_engine engine, size_t* left) {
  return Guarded([&] { *Required(left, "left") = Engines::Global().Get(engine)->Step(); });
}

int32_t mlcpipe_cancel_answer(mlcpipe_engine engine, mlcpipe_answer answer) {
  return Guarded([&] { Engines::Global().Get(engine)->CancelAnswer(answer); });
}

int32_t mlcpipe_tokenize(mlcpipe_engine engine, mlcpipe_text text, int32_t add_special_tokens, int32_t* ids,
                         size_t room, size_t* count) {
  return Guarded([&] {
    const auto open = Engines::Global().Get(engine);
    GiveAll(open->text().tokenizer().Encode(ViewOf(text), add_special_tokens != 0), ids, room, count);
  });
}

int32_t mlcpipe_tokenize_chat(mlcpipe_engine engine, mlcpipe_text messages, mlcpipe_text variables, int32_t* ids,
                              size_t room, size_t* count) {
  return Guarded([&] {
    const auto open = Engines::Global().Get(engine);
    GiveAll(open->text().EncodeChat(ViewOf(messages), ViewOf(variables)), ids, room, count);
  });
}

int32_t mlcpipe_detokenize(mlcpipe_engine engine, const int32_t* ids, size_t count, char* text, size_t room,
                           size_t* bytes) {
  return Guarded([&] {
    const auto open = Engines::Global().Get(engine);
    const std::vector<int32_t> taken = Ids(ids, count, "ids");
    GiveAll(open->text().tokenizer().Decode({taken.begin(), taken.end()}), text, room, bytes);
  });
}

int32_t mlcpipe_render(mlcpipe_engine engine, mlcpipe_text messages, mlcpipe_text variables, char* text, size_t room,
                       size_t* bytes) {
  return Guarded([&] {
    const auto open = Engines::Global().Get(engine);
    GiveAll(open->text().Render(ViewOf(messages), ViewOf(variables)), text, room, bytes);
  });
}

int32_t mlcpipe_cancel(mlcpipe_engine engine) {
  return Guarded([&] { Engines::Global().Get(engine)->Cancel(); });
}

int32_t mlcpipe_logits(mlcpipe_engine engine, const int32_t* tokens, size_t count, float* logits) {
  return Guarded([&] {
    Engines::Global().Get(engine)->AllLogits(Ids(tokens, count, "tokens"),
                                             Required(logits, "logits"));
  });
}

int32_t mlcpipe_reset(mlcpipe_engine engine) {
  return Guarded([&] { Engines::Global().Get(engine)->Reset(); });
}

int32_t mlcpipe_save(mlcpipe_engine engine, const char* path, mlcpipe_text chat) {
  return Guarded([&] { Engines::Global().Get(engine)->Save(Required(path, "path"), ViewOf(chat)); });
}

int32_t mlcpipe_restore(mlcpipe_engine engine, const char* path, mlcpipe_on_text on_chat, void* context) {
  return Guarded([&] {
    Engines::Global().Get(engine)->Restore(Required(path, "path"), [&](std::string_view chat) {
      if (!on_chat || chat.empty() || !on_chat(context, chat.data(), chat.size())) return;
      throw Error(Code::kCancelled, "the chat was not wanted");
    });
  });
}

int32_t mlcpipe_trim(mlcpipe_engine engine) {
  return Guarded([&] { Engines::Global().Get(engine)->Trim(); });
}

int32_t mlcpipe_set_threads(int32_t threads) {
  return Guarded([&] { mlcpipe::SetThreads(threads, true); });
}

int32_t mlcpipe_set_background(int32_t background) {
  return Guarded([&] { mlcpipe::SetBackground(background != 0); });
}
