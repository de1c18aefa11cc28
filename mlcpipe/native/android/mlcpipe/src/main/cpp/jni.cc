// The C API for Kotlin (ai.mlcpipe.Native). Texts cross as bytes of UTF-8: Java's own strings have another encoding in
// JNI. An error is thrown as ai.mlcpipe.MlcpipeException.
#include <dlfcn.h>
#include <jni.h>
#include <mlcpipe.h>

#include <cmath>
#include <cstring>
#include <new>
#include <string>
#include <vector>

namespace {

struct Classes {
  jclass native = nullptr;
  jmethodID failure = nullptr;
  jmethodID on_token = nullptr;
  jmethodID on_text = nullptr;
};

Classes classes;

jbyteArray BytesOf(JNIEnv* env, const char* data, size_t bytes) {
  const auto array = env->NewByteArray(static_cast<jsize>(bytes));
  if (array) env->SetByteArrayRegion(array, 0, static_cast<jsize>(bytes), reinterpret_cast<const jbyte*>(data));
  return array;
}

jbyteArray BytesOf(JNIEnv* env, const std::string& text) { return BytesOf(env, text.data(), text.size()); }

// Allocates nothing of C++: it is called where memory ended.
void Throw(JNIEnv* env, int32_t code, const char* line, const char* next_step = "") {
  if (env->ExceptionCheck()) return;  // of a callback, which ended the call
  const auto text = BytesOf(env, line, std::strlen(line)), next = BytesOf(env, next_step, std::strlen(next_step));
  if (!text || !next) return;
  const auto failure = env->CallStaticObjectMethod(classes.native, classes.failure, code, text, next);
  if (!env->ExceptionCheck()) env->Throw(static_cast<jthrowable>(failure));
}

// Throws the last error unless a call has succeeded.
bool Succeeded(JNIEnv* env, int32_t code) {
  if (code == MLCPIPE_OK) return true;
  mlcpipe_error error{};
  error.size = sizeof error;
  mlcpipe_last_error(&error);
  Throw(env, code, error.line, error.next_step);
  return false;
}

// The result of `work`, or a value that Java never sees beside the exception for what it threw.
template <typename Work>
auto Guarded(JNIEnv* env, Work work) -> decltype(work()) {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    Throw(env, MLCPIPE_RESOURCE, "the system gives no more memory");
  } catch (const std::exception& error) {
    Throw(env, MLCPIPE_INTERNAL, error.what());
  }
  return decltype(work())();
}

// Bytes of a Java array, with a 0 behind them.
class Bytes {
 public:
  Bytes(JNIEnv* env, jbyteArray array) : given_(array != nullptr) {
    if (!array) return;
    text_.resize(static_cast<size_t>(env->GetArrayLength(array)));
    env->GetByteArrayRegion(array, 0, static_cast<jsize>(text_.size()), reinterpret_cast<jbyte*>(text_.data()));
  }

  mlcpipe_text text() const { return {given_ ? text_.data() : nullptr, text_.size()}; }

  // For a path: a name with a 0 in it would be another file's.
  bool IsPath(JNIEnv* env) const {
    if (text_.find('\0') == std::string::npos) return true;
    Throw(env, MLCPIPE_USAGE, "a path has a character 0");
    return false;
  }

  const char* path() const { return text_.c_str(); }

 private:
  std::string text_;
  bool given_;
};

// Of mlcpipe.h: `numbers` are code, context_length, threads and gpu_code; `texts` device, cache and gpu_path, "": none.
class Options {
 public:
  Options(JNIEnv* env, jlongArray numbers, jobjectArray texts) {
    jlong given[4] = {};
    env->GetLongArrayRegion(numbers, 0, 4, given);
    for (jsize i = 0; i < 3 && !env->ExceptionCheck(); ++i) {
      texts_.emplace_back(env, static_cast<jbyteArray>(env->GetObjectArrayElement(texts, i)));
    }
    if (env->ExceptionCheck()) return;
    options_.size = sizeof options_;
    options_.code = reinterpret_cast<const mlcpipe_symbol*>(given[0]);
    options_.context_length = given[1];
    options_.threads = static_cast<int32_t>(given[2]);
    options_.gpu_code = reinterpret_cast<const mlcpipe_symbol*>(given[3]);
    options_.device = texts_[0].path();
    options_.cache = texts_[1].path();
    options_.gpu_path = texts_[2].path();
  }
  Options(const Options&) = delete;

  // Null where Java's exception, or ours, is pending.
  const mlcpipe_options* get(JNIEnv* env) const {
    if (env->ExceptionCheck()) return nullptr;
    for (const Bytes& text : texts_) {
      if (!text.IsPath(env)) return nullptr;
    }
    return &options_;
  }

 private:
  std::vector<Bytes> texts_;
  mlcpipe_options options_{};
};

template <typename Array, typename Value>
Array Filled(JNIEnv* env, Array array, void (JNIEnv::*set)(Array, jsize, jsize, const Value*),
             const std::vector<Value>& values) {
  if (array) (env->*set)(array, 0, static_cast<jsize>(values.size()), values.data());
  return array;
}

jlongArray Longs(JNIEnv* env, const std::vector<jlong>& values) {
  return Filled(env, env->NewLongArray(static_cast<jsize>(values.size())), &JNIEnv::SetLongArrayRegion, values);
}

// The table of symbols in a model's shared library, which stays loaded.
jlong LoadCode(JNIEnv* env, jclass, jbyteArray library) {
  return Guarded(env, [&]() -> jlong {
    const Bytes path(env, library);
    if (!path.IsPath(env)) return 0;
    void* const loaded = dlopen(path.path(), RTLD_NOW | RTLD_LOCAL);
    void* const table = loaded ? dlsym(loaded, "mlcpipe_library_symbols") : nullptr;
    if (table) return reinterpret_cast<jlong>(table);
    const char* const reason = dlerror();
    const std::string line = "the model's code does not load: " + std::string(reason ? reason : path.path());
    Throw(env, MLCPIPE_BUNDLE, line.c_str());
    return 0;
  });
}

jlongArray MakePlan(JNIEnv* env, jclass, jbyteArray file, jlongArray numbers, jobjectArray texts) {
  return Guarded(env, [&]() -> jlongArray {
    const Bytes path(env, file);
    const Options given(env, numbers, texts);
    const mlcpipe_options* const options = given.get(env);
    mlcpipe_plan_info plan{};
    plan.size = sizeof plan;
    if (!options || !path.IsPath(env) || !Succeeded(env, mlcpipe_plan(path.path(), options, &plan))) return nullptr;
    return Longs(env, {plan.weights_bytes, plan.kv_bytes, plan.workspace_bytes, plan.free_bytes, plan.context_length,
                       plan.fits});
  });
}

jlong Open(JNIEnv* env, jclass, jbyteArray file, jlongArray numbers, jobjectArray texts) {
  return Guarded(env, [&]() -> jlong {
    const Bytes path(env, file);
    const Options given(env, numbers, texts);
    const mlcpipe_options* const options = given.get(env);
    mlcpipe_engine engine = 0;
    if (options && path.IsPath(env)) Succeeded(env, mlcpipe_open(path.path(), options, &engine));
    return static_cast<jlong>(engine);
  });
}

jlong OpenDescriptor(JNIEnv* env, jclass, jint descriptor, jlong offset, jlong bytes, jlongArray numbers,
                     jobjectArray texts) {
  return Guarded(env, [&]() -> jlong {
    const Options given(env, numbers, texts);
    const mlcpipe_options* const options = given.get(env);
    mlcpipe_engine engine = 0;
    if (options) {
      Succeeded(env, mlcpipe_open_descriptor(descriptor, static_cast<uint64_t>(offset), static_cast<uint64_t>(bytes),
                                             options, &engine));
    }
    return static_cast<jlong>(engine);
  });
}

// A text of mlcpipe_engine_info.
template <const char* mlcpipe_engine_info::*Text>
jbyteArray InfoText(JNIEnv* env, jclass, jlong engine) {
  mlcpipe_engine_info info{};
  info.size = sizeof info;
  if (!Succeeded(env, mlcpipe_info(static_cast<mlcpipe_engine>(engine), &info))) return nullptr;
  return BytesOf(env, info.*Text, std::strlen(info.*Text));
}

jlongArray Info(JNIEnv* env, jclass, jlong engine) {
  return Guarded(env, [&]() -> jlongArray {
    mlcpipe_engine_info info{};
    info.size = sizeof info;
    if (!Succeeded(env, mlcpipe_info(static_cast<mlcpipe_engine>(engine), &info))) return nullptr;
    return Longs(env, {info.vocab_size, info.context_length, info.threads});
  });
}

struct Sink {
  JNIEnv* env;
  jobject object;
};

int32_t OnToken(void* context, int32_t token) {
  const auto* const sink = static_cast<Sink*>(context);
  const bool more = sink->env->CallBooleanMethod(sink->object, classes.on_token, token);
  return sink->env->ExceptionCheck() || !more;
}

int32_t OnText(void* context, const char* text, size_t bytes) {
  const auto* const sink = static_cast<Sink*>(context);
  if (sink->env->ExceptionCheck()) return 1;  // of the token's call: Java may not be called beside it
  const auto array = BytesOf(sink->env, text, bytes);
  if (!array) return 1;
  sink->env->CallVoidMethod(sink->object, classes.on_text, array);
  sink->env->DeleteLocalRef(array);
  return sink->env->ExceptionCheck();
}

// `numbers` in the order of mlcpipe_sampling; NaN: the default.
mlcpipe_sampling SamplingOf(JNIEnv* env, jdoubleArray numbers, jlong seed) {
  mlcpipe_sampling sampling{};
  sampling.size = sizeof sampling;
  mlcpipe_default_sampling(&sampling);
  jdouble given[7] = {};
  env->GetDoubleArrayRegion(numbers, 0, 7, given);
  double* const real[] = {&sampling.temperature, &sampling.top_p, &sampling.min_p, nullptr,
                          &sampling.repetition_penalty, &sampling.presence_penalty, &sampling.frequency_penalty};
  for (int i = 0; i < 7; ++i) {
    if (real[i] && !std::isnan(given[i])) *real[i] = given[i];
  }
  if (!std::isnan(given[3])) sampling.top_k = static_cast<int64_t>(given[3]);
  sampling.seed = static_cast<uint64_t>(seed);
  return sampling;
}

jdoubleArray Generate(JNIEnv* env, jclass, jlong engine, jbyteArray messages, jbyteArray variables, jlong max_tokens,
                      jdoubleArray sampling, jlong seed, jobject object) {
  return Guarded(env, [&]() -> jdoubleArray {
    const Bytes chat(env, messages), extras(env, variables);
    const mlcpipe_sampling drawn = SamplingOf(env, sampling, seed);
    if (env->ExceptionCheck()) return nullptr;
    Sink sink{env, object};
    mlcpipe_request request{};
    request.size = sizeof request;
    request.messages = chat.text();
    request.variables = extras.text();
    request.max_tokens = max_tokens;
    request.sampling = &drawn;
    request.on_token = OnToken;
    request.on_text = OnText;
    request.context = &sink;
    mlcpipe_statistics s{};
    s.size = sizeof s;
    if (!Succeeded(env, mlcpipe_generate(static_cast<mlcpipe_engine>(engine), &request, &s))) return nullptr;
    const std::vector<jdouble> values{static_cast<jdouble>(s.finish),
                                      static_cast<jdouble>(s.prompt_tokens),
                                      static_cast<jdouble>(s.cached_tokens),
                                      static_cast<jdouble>(s.completion_tokens),
                                      s.load_s,
                                      s.prefill_s,
                                      s.decode_s};
    return Filled(env, env->NewDoubleArray(static_cast<jsize>(values.size())), &JNIEnv::SetDoubleArrayRegion, values);
  });
}

jintArray TokenizeChat(JNIEnv* env, jclass, jlong engine, jbyteArray messages) {
  return Guarded(env, [&]() -> jintArray {
    const Bytes chat(env, messages);
    std::vector<jint> ids;
    size_t count = 0;
    do {
      ids.resize(count);
      const auto open = static_cast<mlcpipe_engine>(engine);
      if (!Succeeded(env, mlcpipe_tokenize_chat(open, chat.text(), {}, ids.data(), ids.size(), &count))) return nullptr;
    } while (count > ids.size());
    return Filled(env, env->NewIntArray(static_cast<jsize>(ids.size())), &JNIEnv::SetIntArrayRegion, ids);
  });
}

void Save(JNIEnv* env, jclass, jlong engine, jbyteArray file, jbyteArray chat) {
  Guarded(env, [&] {
    const Bytes path(env, file), text(env, chat);
    if (!path.IsPath(env)) return;
    Succeeded(env, mlcpipe_save(static_cast<mlcpipe_engine>(engine), path.path(), text.text()));
  });
}

int32_t KeepChat(void* context, const char* text, size_t bytes) {
  try {
    static_cast<std::string*>(context)->assign(text, bytes);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

jbyteArray Restore(JNIEnv* env, jclass, jlong engine, jbyteArray file) {
  return Guarded(env, [&]() -> jbyteArray {
    const Bytes path(env, file);
    std::string chat;
    if (!path.IsPath(env)) return nullptr;
    const auto open = static_cast<mlcpipe_engine>(engine);
    if (!Succeeded(env, mlcpipe_restore(open, path.path(), KeepChat, &chat))) return nullptr;
    return BytesOf(env, chat);
  });
}

template <int32_t (*Call)(mlcpipe_engine)>
void OfEngine(JNIEnv* env, jclass, jlong engine) {
  Succeeded(env, Call(static_cast<mlcpipe_engine>(engine)));
}

void SetThreads(JNIEnv* env, jclass, jint threads) { Succeeded(env, mlcpipe_set_threads(threads)); }

template <typename Function>
JNINativeMethod Method(const char* name, const char* signature, Function* function) {
  return {const_cast<char*>(name), const_cast<char*>(signature), reinterpret_cast<void*>(function)};
}

bool Register(JNIEnv* env) {
  const JNINativeMethod methods[] = {
      Method("loadCode", "([B)J", LoadCode),
      Method("plan", "([B[J[[B)[J", MakePlan),
      Method("open", "([B[J[[B)J", Open),
      Method("openDescriptor", "(IJJ[J[[B)J", OpenDescriptor),
      Method("info", "(J)[J", Info),
      Method("device", "(J)[B", InfoText<&mlcpipe_engine_info::device>),
      Method("deviceTitle", "(J)[B", InfoText<&mlcpipe_engine_info::device_title>),
      Method("generate", "(J[B[BJ[DJLai/mlcpipe/Sink;)[D", Generate),
      Method("tokenizeChat", "(J[B)[I", TokenizeChat),
      Method("save", "(J[B[B)V", Save),
      Method("restore", "(J[B)[B", Restore),
      Method("cancel", "(J)V", OfEngine<mlcpipe_cancel>),
      Method("close", "(J)V", OfEngine<mlcpipe_close>),
      Method("reset", "(J)V", OfEngine<mlcpipe_reset>),
      Method("trim", "(J)V", OfEngine<mlcpipe_trim>),
      Method("setThreads", "(I)V", SetThreads),
  };
  return env->RegisterNatives(classes.native, methods, static_cast<jint>(std::size(methods))) == JNI_OK;
}

}  // namespace

// A class or method that is missing leaves Java's own error pending: System.loadLibrary throws it.
extern "C" JNIEXPORT jint JNICALL JNI_OnLoad(JavaVM* machine, void*) {
  JNIEnv* env = nullptr;
  if (machine->GetEnv(reinterpret_cast<void**>(&env), JNI_VERSION_1_6) != JNI_OK) return JNI_ERR;
  const jclass native = env->FindClass("ai/mlcpipe/Native");
  const jclass sink = native ? env->FindClass("ai/mlcpipe/Sink") : nullptr;
  if (!sink) return JNI_ERR;
  classes.native = static_cast<jclass>(env->NewGlobalRef(native));
  classes.failure = env->GetStaticMethodID(native, "failure", "(I[B[B)Lai/mlcpipe/MlcpipeException;");
  classes.on_token = classes.failure ? env->GetMethodID(sink, "onToken", "(I)Z") : nullptr;
  classes.on_text = classes.on_token ? env->GetMethodID(sink, "onText", "([B)V") : nullptr;
  return classes.on_text && Register(env) ? JNI_VERSION_1_6 : JNI_ERR;
}
