// Threads with stacks that the runtime fits in: musl's have 128 KB.
#ifndef MLCPIPE_RUNTIME_CLI_THREAD_H_
#define MLCPIPE_RUNTIME_CLI_THREAD_H_

#include <pthread.h>

#include <functional>
#include <memory>

namespace mlcpipe::cli {

// Runs in a new thread, which is to be joined. Returns whether the system gives one.
inline bool StartThread(std::function<void()> run, pthread_t* thread) {
  constexpr size_t kStackBytes = 1 << 20;
  auto work = std::make_unique<std::function<void()>>(std::move(run));
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, kStackBytes);
  const auto enter = [](void* argument) -> void* {
    const std::unique_ptr<std::function<void()>> owned(static_cast<std::function<void()>*>(argument));
    (*owned)();
    return nullptr;
  };
  const bool started = pthread_create(thread, &attributes, enter, work.get()) == 0;
  pthread_attr_destroy(&attributes);
  if (started) work.release();
  return started;
}

}  // namespace mlcpipe::cli

#endif  // MLCPIPE_RUNTIME_CLI_THREAD_H_
