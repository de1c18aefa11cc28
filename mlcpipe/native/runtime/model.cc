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

tvm::ffi::Array<Tensor> MakeStates(const StateTable& table, const Device& device, const Units& units) {
  tvm::ffi::Array<Tensor> made;
  for (const State& state : table.all()) {
    const DLDataType dtype = tvm::ffi::StringToDLDataType(state.dtype);
    made.push_back(device.Empty({units.of(state), state.unit_bytes / state.item_bytes}, dtype));
  }
  return made;
}

void CopyPage(const StateTable& table, const tvm::ffi::Array<Tensor>& states, std::optional<size_t> group, int32_t from,
              int32_t to) {
  for (size_t i = 0; i < table.all().size(); ++i) {
    const State& state = table.all()[i];
    if (!state.paged || (group && *group != state.group)) continue;
    const Tensor& data = states[static_cast<int64_t>(i)];
    const auto bytes = static_cast<size_t>(state.unit_bytes);
    CopyBytes(data, static_cast<size_t>(from) * bytes, data, static_cast<size_t>(to) * bytes, bytes);
  }
}

Model::Model(const Manifest& manifest, const Device& device, const Library& library, tvm::ffi::Array<Tensor> params,
             const Plan& plan, const int* cancelled)
    : manifest_(manifest),
      device_(device),
      plan_(plan),
      decode_(library.Get("decode")),
      prefill_(library.Get("prefill")),
      params_(std::move(params)),
      states_(MakeStates(manifest.states, device, plan.units)),
      cancelled_(cancelled),
      sequences_(plan.units.pages[0], plan.units.slots),
      sampler_(device, library, manifest.model.vocab_size, 1),
      step_(1, manifest.states.has_slots()),  // no group gives pages back, so all have one table
      id_(Empty({1}, kInt32)),
      decode_logits_(device.Empty({1, manifest.model.vocab_size}, kFloat32)),
      prefill_logits_(device.Empty({1, manifest.model.vocab_size}, kFloat32)),
      id_on_device_(device),
      step_on_device_(device) {}

void Model::CheckFits(int64_t count) const {
  if (count <= plan_.context_length) return;
  throw Error(Code::kUsage, "the context is full")
      .Expected("at most " + std::to_string(plan_.context_length) + " tokens, prompt and answer")
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
    const int64_t same = sequences_.Usable(sequence, std::mismatch(begin, end, tokens.begin()).first - begin);
    if (same > nearest.length) nearest = {&sequence, same};
  }
  return nearest;
}

Sequence& Model::Begin(const std::vector<int32_t>& tokens, const Prefix& prefix) {
  if (states_.empty()) states_ = MakeStates(manifest_.states, device_, plan_.units);
  if (prefix.length) {
    const auto [from, to] = sequences_.Fork(*prefix.of, prefix.length);
    if (from != to) CopyPage(manifest_.states, states_, std::nullopt, from, to);
  } else {
    sequences_.Start();
  }
  const auto count = static_cast<int64_t>(tokens.size());
  sequences_.Reserve(count);
  Sequence& now = sequences_.current();
  now.tokens.reserve(static_cast<size_t>(plan_.context_length));  // so that no token of an answer allocates
  now.pages.reserve(static_cast<size_t>(PagesOf(plan_.context_length)));
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
  if (now.length && count - now.length == 1) return Decode(tokens.back(), drawn);
  const int64_t chunk = manifest_.model.prefill_chunk, border = (count - 1) / kPage * kPage;
  // Where a prompt that begins with this one may go on from.
  const int64_t cut = manifest_.states.has_slots() && border - now.length >= kCheckpointTokens ? border : 0;
  sequences_.Keep();
  const Tensor row = Empty({1}, kInt32);
  while (now.length < count) {
    CheckCancelled();
    const int64_t end = now.length < cut ? cut : count, rows = std::min(chunk, end - now.length);
    const bool last = now.length + rows == count;
    *Data<int32_t>(row) = last ? static_cast<int32_t>(rows - 1) : 0;  // no kernel takes no rows
    ComputePrompt(rows, row, prefill_logits_);
    if (now.length == end) sequences_.Keep();
  }
  return Draw(prefill_logits_, drawn);
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
  return Decode(token, drawn);
}

const Tensor& Model::FillStep(int64_t rows) {
  const Sequence& now = sequences_.current();
  const auto [read, write] = sequences_.BeginStep();
  const Span span{now.length, rows, now.prompt_length, &now.pages, read, write};
  return step_.Fill(&span, 1);
}

void Model::ComputePrompt(int64_t count, const Tensor& rows, const Tensor& logits) {
  const Sequence& now = sequences_.current();
  const Tensor ids = Empty({count}, kInt32);
  std::copy_n(now.tokens.begin() + now.length, count, Data<int32_t>(ids));
  const Watch watch(cancelled_, count);
  try {
    prefill_(device_.Put(ids), device_.Put(rows), device_.Put(FillStep(count)), logits, states_, params_);
    device_.Wait();  // so that a cancel waits for one chunk, not for all
  } catch (const tvm::ffi::Error& error) {
    throw Failed(error);
  }
  sequences_.EndStep(count);
}

int32_t Model::Decode(int32_t token, Row* drawn) {
  *Data<int32_t>(id_) = token;
  try {
    const Tensor& step = step_on_device_.Put(FillStep(1));
    decode_(id_on_device_.Put(id_), step, decode_logits_, states_, params_);
  } catch (const tvm::ffi::Error& error) {
    throw Failed(error);
  }
  sequences_.EndStep(1);
  return Draw(decode_logits_, drawn);
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
    ComputePrompt(rows, wanted, part);
    CopyOut(part, 0, logits + begin * vocab, static_cast<size_t>(rows * vocab) * sizeof(float));
  }
}

ChatHeader Model::Header() const {
  ChatHeader header;
  manifest_.model.kv_dtype.copy(header.kv_dtype, sizeof header.kv_dtype);
  manifest_.identity.copy(header.model, sizeof header.model);
  manifest_.states.Hash().copy(header.states, sizeof header.states);
  return header;
}

// What a saved chat has of a state: numbers of units, pages in their order or a slot.
std::vector<int32_t> Model::SavedUnits(const State& state) const {
  const Sequence& now = sequences_.current();
  if (!state.paged) return {now.slot};
  const auto [first, count] = state.NeededAfter(now.length);
  return {now.pages.begin() + first, now.pages.begin() + first + count};
}

void Model::Save(const std::string& path, std::string_view chat) const {
  CheckChat(chat);
  Tensor host;
  WriteChat(path, Header(), manifest_.states, sequences_.current(), chat, [&](size_t number) -> UnitsOfState {
    const State& state = manifest_.states.all()[number];
    const Tensor& data = states_[static_cast<int64_t>(number)];
    std::vector<int32_t> units = SavedUnits(state);
    if (device_.on_host()) return {Data<uint8_t>(data), std::move(units)};
    const int64_t bytes = state.unit_bytes, count = static_cast<int64_t>(units.size());
    const Tensor packed = device_.Empty({count, bytes}, kInt8);
    for (int64_t at = 0; at < count; ++at) {
      const auto unit = static_cast<int64_t>(std::exchange(units[static_cast<size_t>(at)], static_cast<int32_t>(at)));
      CopyBytes(data, static_cast<size_t>(unit * bytes), packed, static_cast<size_t>(at * bytes), static_cast<size_t>(bytes));
    }
    host = Empty({count, bytes}, kInt8);
    host.CopyFrom(packed);
    return {Data<uint8_t>(host), std::move(units)};
  });
}

void Model::Restore(const std::string& path, const std::function<void(std::string_view)>& on_chat) {
  const MappedFile file = OpenRegular(path, [&](std::string expected, std::string found) {
    return Error(Code::kUsage, "cannot read the saved chat").Where(path).Expected(expected).Found(found);
  });
  const ModelInfo& model = manifest_.model;
  const ChatLimits limits{model.vocab_size, plan_.context_length, model.context_length};
  SavedChat saved(file.text(), path, Header(), manifest_.states, limits);
  CheckChat(saved.chat);
  on_chat(saved.chat);
  if (states_.empty()) states_ = MakeStates(manifest_.states, device_, plan_.units);
  Sequence& now = sequences_.Start();
  const auto count = static_cast<int64_t>(saved.tokens.size());
  if (!count) return;
  sequences_.Reserve(count);
  sequences_.BeginStep();
  sequences_.EndStep(count);
  for (size_t number = 0; number < manifest_.states.all().size(); ++number) {
    const State& state = manifest_.states.all()[number];
    const auto bytes = static_cast<size_t>(state.unit_bytes);
    for (const int32_t unit : SavedUnits(state)) {
      CopyIn(saved.states, states_[static_cast<int64_t>(number)], static_cast<size_t>(unit) * bytes, bytes);
      saved.states += bytes;
    }
    // Of a window no earlier pages are there.
    now.shortest = std::max(now.shortest, ShortestAfter(state.window, count));
  }
  now.prompt_length = saved.prompt_tokens;
  now.rope = RopeOf(now.prompt_length);
  now.tokens = std::move(saved.tokens);
}

void Model::Trim() {
  const auto& pages = sequences_.free_pages();
  if (!device_.on_host()) {
    if (static_cast<int64_t>(pages.size()) == PagesOf(plan_.context_length)) states_ = tvm::ffi::Array<Tensor>();
    return;
  }
  for (size_t number = 0; number < states_.size(); ++number) {
    const State& state = manifest_.states.all()[number];
    std::vector<int32_t> free = state.paged ? pages : sequences_.free_slots();
    std::sort(free.begin(), free.end());
    const auto bytes = static_cast<size_t>(state.unit_bytes);
    for (size_t first = 0, end = 0; first < free.size(); first = end) {
      do ++end;
      while (end < free.size() && free[end] == free[end - 1] + 1);  // units that lie together
      Discard(Data<char>(states_[static_cast<int64_t>(number)]) + static_cast<size_t>(free[first]) * bytes,
              (end - first) * bytes);
    }
  }
}

void Model::CheckCancelled() const {
  if (__atomic_load_n(cancelled_, __ATOMIC_RELAXED)) throw Error(Code::kCancelled, "the answer was cancelled");
}

Error Model::Failed(const tvm::ffi::Error& error) {
  ReclaimWorkspaces();
  sequences_.FailStep();
  if (__atomic_load_n(cancelled_, __ATOMIC_RELAXED)) return Error(Code::kCancelled, "the answer was cancelled");
  return FromTvm(error, Code::kInternal, "the compiled library failed");
}

}  // namespace mlcpipe
