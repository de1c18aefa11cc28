#include "model.h"

#include <algorithm>
#include <utility>

#include "host.h"
#include "pool.h"
#include "tensors.h"
#include "text/json.h"
#include "workspace.h"

namespace mlcpipe {
namespace {

using tvm::runtime::Tensor;

// Of the logits that one forward gives where all are wanted: 512 rows of a vocabulary of 128256 would be 262 MB.
constexpr int64_t kLogitsBytes = 64 << 20;

// Throws kUsage for a chat that is no object of JSON.
void CheckChat(std::string_view chat) {
  if (chat.empty()) return;
  const chat::Characters none{};
  chat::Heap heap(none);
  try {
    if (ReadJson(&heap, chat, "the chat").is(chat::Kind::kDict)) return;
  } catch (const Error& error) {
    throw Error(Code::kUsage, error.what());
  }
  throw Error(Code::kUsage, "JSON that cannot be used").Where("the chat").Expected("an object");
}

// Inside, loops of this thread end when the call is cancelled.
struct Watch {
  Watch(const int* cancelled, int64_t tokens) { mlcpipe_pool_watch(cancelled, tokens); }
  ~Watch() { mlcpipe_pool_watch(nullptr, 0); }
};

}  // namespace

tvm::ffi::Array<Tensor> MakePages(const Manifest& manifest, const Device& device, const std::vector<int64_t>& pages) {
  tvm::ffi::Array<Tensor> made;
  for (const int64_t count : pages) made.push_back(device.Empty({count, manifest.page_bytes()}, kInt8));
  return made;
}

void CopyPage(const Manifest& manifest, const tvm::ffi::Array<Tensor>& layers, int32_t from, int32_t to) {
  const auto bytes = static_cast<size_t>(manifest.page_bytes());
  for (const Tensor& layer : layers) {
    CopyBytes(layer, static_cast<size_t>(from) * bytes, layer, static_cast<size_t>(to) * bytes, bytes);
  }
}

Model::Model(const Manifest& manifest, const Device& device, const Library& library, tvm::ffi::Array<Tensor> params,
             int64_t context_length, const int* cancelled)
    : manifest_(manifest),
      device_(device),
      context_length_(context_length),
      few_(library.Get("forward_few")),
      many_(library.Get("forward_many")),
      params_(std::move(params)),
      pages_(NewPages()),
      cancelled_(cancelled),
      sequences_(PagesOf(context_length)),
      sampler_(device, library, manifest.model.vocab_size, 1),
      few_step_(PagesOf(context_length)),
      many_step_(PagesOf(context_length)),
      few_id_(Empty({1}, kInt32)),
      few_logits_(device.Empty({1, manifest.model.vocab_size}, kFloat32)),
      many_logits_(device.Empty({1, manifest.model.vocab_size}, kFloat32)),
      few_ids_on_device_(device),
      few_step_on_device_(device) {}

void Model::CheckFits(int64_t count) const {
  if (count <= context_length_) return;
  throw Error(Code::kUsage, "the context is full")
      .Expected("at most " + std::to_string(context_length_) + " tokens, prompt and answer")
      .Found(std::to_string(count))
      .Next("shorten the prompt, start a new conversation, or load with a larger context");
}

// Kernels take rows of the embedding by these numbers and do not check them.
void CheckIds(const std::vector<int32_t>& tokens, int64_t vocab) {
  const auto bad = std::find_if(tokens.begin(), tokens.end(), [&](int32_t id) { return id < 0 || id >= vocab; });
  if (bad == tokens.end() && !tokens.empty()) return;
  throw Error(Code::kUsage, "token ids")
      .Expected("one or more integers from 0 to " + std::to_string(vocab - 1))
      .Found(tokens.empty() ? "none" : std::to_string(*bad));
}

int64_t Model::RopeOf(int64_t length) const {
  const auto above = manifest_.model.rope_above;
  return above ? std::max(length, *above) : 0;
}

Model::Prefix Model::Nearest(const std::vector<int32_t>& tokens) const {
  const auto count = static_cast<int64_t>(tokens.size());
  const auto limit = manifest_.model.recompute_above;
  Prefix nearest;
  for (const Sequence& sequence : sequences_.all()) {
    // RoPE's frequencies are others on the other side of the limit.
    if (limit && (count > *limit) != (std::max(sequence.length, sequence.prompt_length) > *limit)) continue;
    if (RopeOf(count) != sequence.rope) continue;
    const auto begin = sequence.tokens.begin(), end = begin + std::min(sequence.length, count - 1);
    const int64_t same = std::mismatch(begin, end, tokens.begin()).first - begin;
    if (same > nearest.length) nearest = {&sequence, same};
  }
  return nearest;
}

Sequence& Model::Begin(const std::vector<int32_t>& tokens, const Prefix& prefix) {
  if (pages_.empty()) pages_ = NewPages();
  if (prefix.length) {
    const auto [from, to] = sequences_.Fork(*prefix.of, prefix.length);
    if (from != to) CopyPage(manifest_, pages_, from, to);
  } else {
    sequences_.Start();
  }
  const auto count = static_cast<int64_t>(tokens.size());
  sequences_.Reserve(count);
  Sequence& now = sequences_.current();
  now.tokens.reserve(static_cast<size_t>(context_length_));  // so that no token of an answer allocates
  now.pages.reserve(static_cast<size_t>(PagesOf(context_length_)));
  now.tokens = tokens;
  now.prompt_length = count;
  now.rope = RopeOf(count);
  return now;
}

int32_t Model::Prefill(const std::vector<int32_t>& tokens, Row* drawn) {
  const auto count = static_cast<int64_t>(tokens.size());
  CheckFits(count);
  CheckIds(tokens, manifest_.model.vocab_size);
  const Sequence& now = Begin(tokens, Nearest(tokens));
  if (now.length && count - now.length == 1) return ForwardFew(tokens.back(), drawn);
  const int64_t chunk = manifest_.model.prefill_chunk;
  const Tensor row = Empty({1}, kInt32);
  while (now.length < count) {
    CheckCancelled();
    const int64_t rows = std::min(chunk, count - now.length);
    const bool last = now.length + rows == count;
    *Data<int32_t>(row) = last ? static_cast<int32_t>(rows - 1) : 0;  // no kernel takes no rows
    ForwardMany(rows, row, many_logits_);
  }
  return Draw(many_logits_, drawn);
}

int32_t Model::Append(int32_t token, Row* drawn) {
  Sequence& now = sequences_.current();
  CheckFits(now.length + 1);
  now.tokens.resize(static_cast<size_t>(now.length));
  now.tokens.push_back(token);
  if (!now.length || now.length == manifest_.model.recompute_above) {
    return Prefill(std::vector<int32_t>(now.tokens), drawn);
  }
  sequences_.Reserve(now.length + 1);
  return ForwardFew(token, drawn);
}

void Model::ForwardMany(int64_t count, const Tensor& rows, const Tensor& logits) {
  Sequence& now = sequences_.current();
  const Tensor ids = Empty({count}, kInt32);
  std::copy_n(now.tokens.begin() + now.length, count, Data<int32_t>(ids));
  const Watch watch(cancelled_, count);
  try {
    many_(device_.Put(ids), device_.Put(rows), device_.Put(many_step_.Fill(now, count)), logits, pages_, params_);
    device_.Wait();  // so that a cancel waits for one chunk, not for all
  } catch (const tvm::ffi::Error& error) {
    throw Failed(error);
  }
  now.length += count;
}

int32_t Model::ForwardFew(int32_t token, Row* drawn) {
  Sequence& now = sequences_.current();
  *Data<int32_t>(few_id_) = token;
  try {
    const Tensor& step = few_step_on_device_.Put(few_step_.Fill(now, 1));
    few_(few_ids_on_device_.Put(few_id_), step, few_logits_, pages_, params_);
  } catch (const tvm::ffi::Error& error) {
    throw Failed(error);
  }
  ++now.length;
  return Draw(few_logits_, drawn);
}

int32_t Model::Draw(const Tensor& logits, Row* drawn) {
  const RowDraw one{drawn, static_cast<uint64_t>(length())};
  int32_t token;
  try {
    token = *sampler_.Draw(logits, &one, 1);
  } catch (const tvm::ffi::Error& error) {
    throw Failed(error);
  }
  if (token < 0) {
    Sequence& now = sequences_.current();
    const bool half = manifest_.model.dtype == "float16", prefilled = now.length == now.prompt_length;
    const std::string tokens = std::to_string(std::exchange(now.length, 0));  // nothing to build on
    throw Error(Code::kCompute, "the model computed numbers that are not finite")
        .Where(prefilled ? "the prefill of " + tokens + " tokens" : "the decode step of token " + tokens)
        .Next(half ? "compile the model for a --target with float32 activations"
                   : "check the weights, or compile with --kv-cache-dtype f32");
  }
  drawn->Accept(token);
  return token;
}

void Model::AllLogits(const std::vector<int32_t>& tokens, float* logits) {
  const auto count = static_cast<int64_t>(tokens.size());
  const int64_t vocab = manifest_.model.vocab_size;
  CheckFits(count);
  CheckIds(tokens, manifest_.model.vocab_size);
  const int64_t chunk = std::min(manifest_.model.prefill_chunk, std::max<int64_t>(1, kLogitsBytes / (4 * vocab)));
  struct Forget {
    Model* model;
    ~Forget() { model->Reset(); }
  } forget{this};
  Reset();
  const Sequence& now = Begin(tokens, {});
  while (now.length < count) {
    const int64_t begin = now.length, rows = std::min(chunk, count - begin);
    const Tensor wanted = Empty({rows}, kInt32), part = device_.Empty({rows, vocab}, kFloat32);
    for (int64_t row = 0; row < rows; ++row) Data<int32_t>(wanted)[row] = static_cast<int32_t>(row);
    CheckCancelled();
    ForwardMany(rows, wanted, part);
    CopyOut(part, 0, logits + begin * vocab, static_cast<size_t>(rows * vocab) * sizeof(float));
  }
}

ChatHeader Model::Header() const {
  const ModelInfo& model = manifest_.model;
  const auto count = [](int64_t number) { return static_cast<uint32_t>(number); };
  ChatHeader header;
  header.page_tokens = count(kPage);
  header.layers = count(model.num_layers);
  header.kv_heads = count(model.num_key_value_heads);
  header.page_bytes = count(manifest_.page_bytes());
  header.head_dim = count(model.head_dim);
  model.kv_dtype.copy(header.kv_dtype, sizeof header.kv_dtype);
  manifest_.identity.copy(header.model, sizeof header.model);
  return header;
}

void Model::Save(const std::string& path, std::string_view chat) const {
  CheckChat(chat);
  const Sequence& now = sequences_.current();
  const int64_t pages = PagesOf(now.length), bytes = manifest_.page_bytes();
  Tensor host;
  WriteChat(path, Header(), now, chat, [&](size_t number) -> PagesOfLayer {
    const Tensor& layer = pages_[static_cast<int64_t>(number)];
    if (device_.on_host()) return {Data<uint8_t>(layer), now.pages.data()};
    const Tensor packed = device_.Empty({pages, bytes}, kInt8);
    for (int64_t page = 0; page < pages; ++page) {
      CopyBytes(layer, static_cast<size_t>(now.pages[static_cast<size_t>(page)] * bytes), packed,
                static_cast<size_t>(page * bytes), static_cast<size_t>(bytes));
    }
    host = Empty({pages, bytes}, kInt8);
    host.CopyFrom(packed);
    return {Data<uint8_t>(host), nullptr};
  });
}

void Model::Restore(const std::string& path, const std::function<void(std::string_view)>& on_chat) {
  const MappedFile file = OpenRegular(path, [&](std::string expected, std::string found) {
    return Error(Code::kUsage, "cannot read the saved chat").Where(path).Expected(expected).Found(found);
  });
  const ModelInfo& model = manifest_.model;
  SavedChat saved(file.text(), path, Header(), {model.vocab_size, context_length_, model.context_length});
  CheckChat(saved.chat);
  on_chat(saved.chat);
  if (pages_.empty()) pages_ = NewPages();
  Sequence& now = sequences_.Start();
  sequences_.Reserve(static_cast<int64_t>(saved.tokens.size()));
  const auto bytes = static_cast<size_t>(manifest_.page_bytes());
  for (const Tensor& layer : pages_) {
    for (int32_t page : now.pages) {
      CopyIn(saved.pages, layer, static_cast<size_t>(page) * bytes, bytes);
      saved.pages += bytes;
    }
  }
  now.length = static_cast<int64_t>(saved.tokens.size());
  now.prompt_length = saved.prompt_tokens;
  now.rope = RopeOf(now.prompt_length);
  now.tokens = std::move(saved.tokens);
}

void Model::Trim() {
  std::vector<int32_t> free = sequences_.free();
  if (!device_.on_host()) {
    if (static_cast<int64_t>(free.size()) == PagesOf(context_length_)) pages_ = tvm::ffi::Array<Tensor>();
    return;
  }
  std::sort(free.begin(), free.end());
  const auto bytes = static_cast<size_t>(manifest_.page_bytes());
  for (size_t first = 0, end = 0; first < free.size(); first = end) {
    do ++end;
    while (end < free.size() && free[end] == free[end - 1] + 1);  // pages that lie together
    for (const Tensor& layer : pages_) {
      Discard(Data<char>(layer) + static_cast<size_t>(free[first]) * bytes, (end - first) * bytes);
    }
  }
}

tvm::ffi::Array<Tensor> Model::NewPages() const {
  const auto layers = static_cast<size_t>(manifest_.model.num_layers);
  return MakePages(manifest_, device_, std::vector<int64_t>(layers, PagesOf(context_length_)));
}

void Model::CheckCancelled() const {
  if (__atomic_load_n(cancelled_, __ATOMIC_RELAXED)) throw Error(Code::kCancelled, "the answer was cancelled");
}

Error Model::Failed(const tvm::ffi::Error& error) const {
  ReclaimWorkspaces();
  if (__atomic_load_n(cancelled_, __ATOMIC_RELAXED)) return Error(Code::kCancelled, "the answer was cancelled");
  return FromTvm(error, Code::kInternal, "the compiled library failed");
}

}  // namespace mlcpipe
