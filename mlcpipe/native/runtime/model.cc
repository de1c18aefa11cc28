#include "model.h"

#include <algorithm>

#include "pool.h"
#include "tensors.h"
#include "text/json.h"
#include "workspace.h"

namespace mlcpipe {
namespace {

using tvm::runtime::Tensor;

// Of the logits that one forward gives where all are wanted: 512 rows of a vocabulary of 128256 would be 262 MB.
constexpr int64_t kLogitsBytes = 64 << 20;

tvm::ffi::Array<Tensor> MakePages(const Manifest& manifest, int64_t pages) {
  tvm::ffi::Array<Tensor> made;
  for (int64_t layer = 0; layer < manifest.model.num_layers; ++layer) {
    made.push_back(Empty({pages, manifest.page_bytes()}, kInt8));
  }
  return made;
}

int64_t PagesOf(int64_t tokens) { return (tokens + kPage - 1) / kPage; }

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

Model::Model(const Manifest& manifest, const Library& library, tvm::ffi::Array<Tensor> params, int64_t context_length,
             const int* cancelled)
    : manifest_(manifest),
      few_(library.Get("forward_few")),
      many_(library.Get("forward_many")),
      params_(std::move(params)),
      pages_(MakePages(manifest, PagesOf(context_length))),
      context_length_(context_length),
      cancelled_(cancelled),
      few_step_(PagesOf(context_length)),
      many_step_(PagesOf(context_length)),
      few_id_(Empty({1}, kInt32)),
      few_logits_(Empty({1, manifest.model.vocab_size}, kFloat32)),
      many_logits_(Empty({1, manifest.model.vocab_size}, kFloat32)) {
  tokens_.reserve(static_cast<size_t>(context_length) + 1);
}

void Model::CheckFits(int64_t count) const {
  if (count <= context_length_) return;
  throw Error(Code::kUsage, "the context is full")
      .Expected("at most " + std::to_string(context_length_) + " tokens, prompt and answer")
      .Found(std::to_string(count))
      .Next("shorten the prompt, start a new conversation, or load with a larger context");
}

// Kernels take rows of the embedding by these numbers and do not check them.
void Model::CheckIds(const std::vector<int32_t>& tokens) const {
  const auto bad = std::find_if(tokens.begin(), tokens.end(),
                                [&](int32_t id) { return id < 0 || id >= manifest_.model.vocab_size; });
  if (bad == tokens.end() && !tokens.empty()) return;
  throw Error(Code::kUsage, "token ids")
      .Expected("one or more integers from 0 to " + std::to_string(manifest_.model.vocab_size - 1))
      .Found(tokens.empty() ? "none" : std::to_string(*bad));
}

int64_t Model::RopeOf(int64_t length) const {
  const auto above = manifest_.model.rope_above;
  return above ? std::max(length, *above) : 0;
}

int64_t Model::Reusable(const std::vector<int32_t>& tokens) const {
  const auto count = static_cast<int64_t>(tokens.size());
  const auto limit = manifest_.model.recompute_above;
  // RoPE's frequencies are others on the other side of the limit.
  if (limit && (count > *limit) != (length_ > *limit)) return 0;
  if (RopeOf(count) != rope_) return 0;
  const int64_t most = std::min(length_, count);
  const auto same = std::mismatch(tokens.begin(), tokens.begin() + most, tokens_.begin()).first - tokens.begin();
  return std::max<int64_t>(0, std::min<int64_t>(same, count - 1));
}

int32_t Model::Prefill(const std::vector<int32_t>& tokens, Sampler* sampler) {
  const auto count = static_cast<int64_t>(tokens.size());
  CheckFits(count);
  CheckIds(tokens);
  const int64_t shared = Reusable(tokens);
  rope_ = RopeOf(count);
  length_ = shared;
  few_from_ = count;
  tokens_ = tokens;
  if (shared && count - shared == 1) return ForwardFew(tokens.back(), sampler);
  const int64_t chunk = manifest_.model.prefill_chunk;
  const Tensor row = Empty({1}, kInt32);
  while (length_ < count) {
    const int64_t rows = std::min(chunk, count - length_);
    const bool last = length_ + rows == count;
    *Data<int32_t>(row) = last ? static_cast<int32_t>(rows - 1) : 0;  // no kernel takes no rows
    ForwardMany(rows, row, many_logits_);
  }
  return Draw(many_logits_, sampler);
}

int32_t Model::Append(int32_t token, Sampler* sampler) {
  if (!length_ || length_ == manifest_.model.recompute_above) {
    std::vector<int32_t> tokens(tokens_.begin(), tokens_.begin() + length_);
    tokens.push_back(token);
    return Prefill(tokens, sampler);
  }
  CheckFits(length_ + 1);
  tokens_.resize(static_cast<size_t>(length_));
  tokens_.push_back(token);
  return ForwardFew(token, sampler);
}

void Model::ForwardMany(int64_t count, const Tensor& rows, const Tensor& logits) {
  const Tensor ids = Empty({count}, kInt32);
  std::copy_n(tokens_.begin() + length_, count, Data<int32_t>(ids));
  const Watch watch(cancelled_, count);
  try {
    many_(ids, rows, many_step_.Fill(length_, count, few_from_), logits, pages_, params_);
  } catch (const tvm::ffi::Error& error) {
    throw Failed(error);
  }
  length_ += count;
}

int32_t Model::ForwardFew(int32_t token, Sampler* sampler) {
  *Data<int32_t>(few_id_) = token;
  try {
    few_(few_id_, few_step_.Fill(length_, 1, few_from_), few_logits_, pages_, params_);
  } catch (const tvm::ffi::Error& error) {
    throw Failed(error);
  }
  ++length_;
  return Draw(few_logits_, sampler);
}

int32_t Model::Draw(const Tensor& logits, Sampler* sampler) {
  int32_t token;
  try {
    token = sampler->Draw(logits, static_cast<uint64_t>(length_));
  } catch (const tvm::ffi::Error& error) {
    throw Failed(error);
  }
  if (token < 0) {
    length_ = 0;  // nothing to build on
    const bool half = manifest_.model.dtype == "float16";
    throw Error(Code::kCompute, "the model computed numbers that are not finite")
        .Next(half ? "compile the model for a --target with float32 activations"
                   : "check the weights, or compile with --kv-cache-dtype f32");
  }
  sampler->Accept(token);
  return token;
}

void Model::AllLogits(const std::vector<int32_t>& tokens, float* logits) {
  const auto count = static_cast<int64_t>(tokens.size());
  const int64_t vocab = manifest_.model.vocab_size;
  CheckFits(count);
  CheckIds(tokens);
  const int64_t chunk = std::min(manifest_.model.prefill_chunk, std::max<int64_t>(1, kLogitsBytes / (4 * vocab)));
  struct Forget {
    Model* model;
    ~Forget() { model->length_ = 0; }
  } forget{this};
  length_ = 0;
  few_from_ = count;
  tokens_ = tokens;
  while (length_ < count) {
    const int64_t begin = length_, rows = std::min(chunk, count - begin);
    const Tensor wanted = Empty({rows}, kInt32), part = Empty({rows, vocab}, kFloat32);
    for (int64_t row = 0; row < rows; ++row) Data<int32_t>(wanted)[row] = static_cast<int32_t>(row);
    ForwardMany(rows, wanted, part);
    std::copy_n(Data<float>(part), rows * vocab, logits + begin * vocab);
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
  std::vector<const uint8_t*> layers;
  for (const Tensor& layer : pages_) layers.push_back(Data<uint8_t>(layer));
  WriteChat(path, Header(), {tokens_.begin(), tokens_.begin() + length_}, length_ ? few_from_ : 0, chat, layers);
}

void Model::Restore(const std::string& path, const std::function<void(std::string_view)>& on_chat) {
  const MappedFile file = OpenRegular(path, [&](std::string expected, std::string found) {
    return Error(Code::kUsage, "cannot read the saved chat").Where(path).Expected(expected).Found(found);
  });
  const ModelInfo& model = manifest_.model;
  SavedChat saved(file.text(), path, Header(), {model.vocab_size, context_length_, model.context_length});
  CheckChat(saved.chat);
  on_chat(saved.chat);
  const auto length = static_cast<int64_t>(saved.tokens.size());
  const auto bytes = static_cast<size_t>(PagesOf(length) * manifest_.page_bytes());
  for (const Tensor& layer : pages_) {
    if (bytes) std::memcpy(Data<uint8_t>(layer), saved.pages, bytes);
    saved.pages += bytes;
  }
  tokens_.assign(saved.tokens.begin(), saved.tokens.end());
  few_from_ = saved.prompt_tokens;
  rope_ = RopeOf(few_from_);
  length_ = length;
}

Error Model::Failed(const tvm::ffi::Error& error) const {
  ReclaimWorkspaces();
  if (__atomic_load_n(cancelled_, __ATOMIC_RELAXED)) return Error(Code::kCancelled, "the answer was cancelled");
  return FromTvm(error, Code::kInternal, "the compiled library failed");
}

}  // namespace mlcpipe
