#include "model.h"

#include <algorithm>
#include <utility>

#include "host.h"
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

void CopyPage(const StateTable& table, const tvm::ffi::Array<Tensor>& states, const serving::PageCopy& copy) {
  for (size_t i = 0; i < table.all().size(); ++i) {
    const State& state = table.all()[i];
    if (!state.paged || state.group != copy.group) continue;
    const Tensor& data = states[static_cast<int64_t>(i)];
    const auto bytes = static_cast<size_t>(state.unit_bytes);
    CopyBytes(data, static_cast<size_t>(copy.source) * bytes, data, static_cast<size_t>(copy.target) * bytes, bytes);
  }
}

std::vector<serving::PageGroup> GroupsOf(const StateTable& table, const Units& units) {
  std::vector<serving::PageGroup> groups;
  for (const int64_t pages : units.pages) groups.push_back({pages, table.windows()[groups.size()]});
  return groups;
}

Model::Model(const Manifest& manifest, const Device& device, const Library& library, TokenTables weights, const Plan& plan,
             const int* cancelled)
    : manifest_(manifest),
      device_(device),
      plan_(plan),
      decode_(library.Get("decode")),
      prefill_(library.Get("prefill")),
      weights_(std::move(weights)),
      states_(MakeStates(manifest.states, device, plan.units)),
      cancelled_(cancelled),
      sampler_(device, library, manifest.model.vocab_size, 1),
      step_(plan.units.pages.size(), manifest.states.has_slots()),
      id_(Empty({1}, kInt32)),
      decode_logits_(device.Empty({1, manifest.model.vocab_size}, kFloat32)),
      prefill_logits_(device.Empty({1, manifest.model.vocab_size}, kFloat32)),
      id_on_device_(device),
      step_on_device_(device) {
  Reset();
}

void Model::Reset() {
  broken_ = true;
  pool_.emplace(GroupsOf(manifest_.states, plan_.units), plan_.units.slots);
  tree_.emplace(&*pool_, manifest_.model.recompute_above, manifest_.model.rope_above);
  now_ = Begun({});
  broken_ = false;
}

void Model::Mend() {
  if (broken_) Reset();
}

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

serving::SequencePointer Model::Begun(std::vector<int32_t> tokens) const {
  serving::Request request;
  request.tokens = std::move(tokens);
  request.redraws = true;
  auto begun = std::make_shared<serving::Sequence>(0, std::move(request), pool_->groups.size());
  begun->tokens.reserve(static_cast<size_t>(plan_.context_length));  // so that no token of an answer allocates
  for (auto& table : begun->tables) table.reserve(static_cast<size_t>(PagesOf(plan_.context_length)));
  return begun;
}

int64_t Model::SharedWith(const serving::Sequence& previous, const serving::Sequence& sequence) const {
  if (tree_->FamilyOf(previous) != tree_->FamilyOf(sequence)) return 0;
  const auto begin = previous.tokens.begin(), end = begin + std::min(previous.computed, sequence.length() - 1);
  const int64_t same = std::mismatch(begin, end, sequence.tokens.begin()).first - begin;
  return tree_->CanGoBack(previous, same) ? same : 0;
}

std::pair<int64_t, serving::CacheMiss> Model::Reusable(const std::vector<int32_t>& tokens) const {
  const serving::SequencePointer sequence = Begun(tokens);
  const int64_t shared = SharedWith(*now_, *sequence);
  sequence->computed = static_cast<int64_t>(tree_->Match(*sequence).size()) * kPage;
  if (!shared || shared < sequence->computed) return {sequence->computed, tree_->MissOf(*sequence)};
  const bool differs = shared < now_->computed && shared < sequence->length() - 1;
  return {shared, differs ? serving::CacheMiss{"prompt_differs", shared} : serving::CacheMiss{}};
}

int32_t Model::Prefill(const std::vector<int32_t>& tokens, Row* drawn, const std::vector<int64_t>& borders) try {
  const auto count = static_cast<int64_t>(tokens.size());
  CheckFits(count);
  CheckIds(tokens, manifest_.model.vocab_size);
  const serving::SequencePointer previous = std::exchange(now_, Begun(tokens));
  const int64_t shared = SharedWith(*previous, *now_);
  if (shared && shared >= static_cast<int64_t>(tree_->Match(*now_).size()) * kPage) {
    tree_->GoBack(previous.get(), shared);
    pool_->Fork(*previous, now_.get());
    pool_->Release(previous.get());
  } else {
    pool_->Release(previous.get());
    tree_->Take(now_.get());
  }
  const int64_t chunk = manifest_.model.prefill_chunk;
  const Tensor row = Empty({1}, kInt32);
  while (length() < count) {
    CheckCancelled();
    const bool whole = count - length() <= chunk;
    const int64_t end = whole ? tree_->CheckpointBefore(length(), count, borders)
                              : tree_->ChunkBefore(length(), length() + chunk, borders);
    const int64_t rows = end - length();
    const bool last = length() + rows == count;
    *Data<int32_t>(row) = last ? static_cast<int32_t>(rows - 1) : 0;  // no kernel takes no rows
    ComputePrompt(rows, row, prefill_logits_);
  }
  return Draw(prefill_logits_, drawn);
} catch (const std::bad_alloc&) {
  broken_ = true;
  throw;
}

int32_t Model::Append(int32_t token, Row* drawn) try {
  CheckFits(length() + 1);
  now_->tokens.resize(static_cast<size_t>(length()));
  now_->tokens.push_back(token);
  if (!length() || length() == manifest_.model.recompute_above) {
    return Prefill(std::vector<int32_t>(now_->tokens), drawn, {});
  }
  return Decode(token, drawn);
} catch (const std::bad_alloc&) {
  broken_ = true;
  throw;
}

void Model::Compute(int64_t rows, const std::function<void(const Tensor&)>& launch) {
  if (states_.empty()) states_ = MakeStates(manifest_.states, device_, plan_.units);
  serving::Sequence* const now = now_.get();
  if (!tree_->Reserve(now, rows)) throw Error(Code::kInternal, "no pages for a context that was planned");
  for (const serving::PageCopy& copy : pool_->TakeCopies()) CopyPage(manifest_.states, states_, copy);
  const Span span = SpanOf(*now, now->computed, rows);
  try {
    launch(step_.Fill(&span, 1));
  } catch (const tvm::ffi::Error& error) {
    pool_->Repeat(now);
    throw Failed(error);
  }
  pool_->Advance(now, rows);
  if (now->computed / kPage > now->shared) {
    tree_->Add(now);
    tree_->LeaveCheckpoint(now);
  }
  pool_->Slide(now, now->computed);
}

void Model::ComputePrompt(int64_t count, const Tensor& rows, const Tensor& logits) {
  const Tensor ids = Empty({count}, kInt32);
  std::copy_n(now_->tokens.begin() + length(), count, Data<int32_t>(ids));
  Compute(count, [&](const Tensor& step) {
    const Watch watch(cancelled_, count);
    mlcpipe_pool_begin_step(step_threads_, INT64_MAX);
    prefill_(device_.Put(ids), device_.Put(rows), device_.Put(step), logits, states_, weights_.For(ids));
    device_.Wait();  // so that a cancel waits for one chunk, not for all
  });
}

int32_t Model::Decode(int32_t token, Row* drawn) {
  *Data<int32_t>(id_) = token;
  Compute(1, [&](const Tensor& step) {
    const DecodeStep timed(step_threads_, 1);
    decode_(id_on_device_.Put(id_), step_on_device_.Put(step), decode_logits_, states_, weights_.For(id_));
  });
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
    const bool half = manifest_.model.dtype == "float16", prefilled = length() == now_->decode_from;
    const std::string tokens = std::to_string(length());
    tree_->Discard(now_.get());  // nothing to build on
    pool_->Release(now_.get());
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
  now_ = Begun(tokens);
  while (length() < count) {
    const int64_t begin = length(), rows = std::min(chunk, count - begin);
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

// The part of a state that a saved chat has: numbers of units, pages in their order or a slot.
std::vector<int32_t> Model::SavedUnits(const State& state) const {
  if (!state.paged) return {now_->slot};
  const auto [first, count] = state.NeededAfter(length());
  const auto begin = now_->tables[state.group].begin() + first;
  return {begin, begin + count};
}

void Model::Save(const std::string& path, std::string_view chat) const {
  CheckChat(chat);
  Tensor host;
  ChatHeader header = Header();
  header.prompt_tokens = static_cast<uint64_t>(length() ? now_->decode_from : 0);
  const std::vector<int32_t> tokens(now_->tokens.begin(), now_->tokens.begin() + length());
  WriteChat(path, header, manifest_.states, tokens, chat, [&](size_t number) -> UnitsOfState {
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
  Reset();
  const auto count = static_cast<int64_t>(saved.tokens.size());
  if (!count) return;
  now_ = Begun(std::move(saved.tokens));
  pool_->Slide(now_.get(), count);
  pool_->Reserve(now_.get(), count);
  pool_->Advance(now_.get(), count);
  now_->decode_from = saved.prompt_tokens;
  try {
    for (size_t number = 0; number < manifest_.states.all().size(); ++number) {
      const State& state = manifest_.states.all()[number];
      const auto bytes = static_cast<size_t>(state.unit_bytes);
      for (const int32_t unit : SavedUnits(state)) {
        CopyIn(saved.states, states_[static_cast<int64_t>(number)], static_cast<size_t>(unit) * bytes, bytes);
        saved.states += bytes;
      }
    }
  } catch (...) {
    Reset();
    throw;
  }
  tree_->Add(now_.get());
  tree_->LeaveCheckpoint(now_.get());
}

void Model::Trim() {
  Mend();
  if (!device_.on_host()) {
    const auto all_free = [](const UnitPool& units) { return units.free() == units.count(); };
    if (std::all_of(pool_->units.begin(), pool_->units.end(), all_free)) states_ = tvm::ffi::Array<Tensor>();
    return;
  }
  for (size_t number = 0; number < states_.size(); ++number) {
    const State& state = manifest_.states.all()[number];
    std::vector<int32_t> free = (state.paged ? pool_->units[state.group] : pool_->units.back()).free_units();
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

Error Model::Failed(const tvm::ffi::Error& error) const {
  ReclaimWorkspaces();
  if (__atomic_load_n(cancelled_, __ATOMIC_RELAXED)) return Error(Code::kCancelled, "the answer was cancelled");
  return FromTvm(error, Code::kInternal, "the compiled library failed");
}

}  // namespace mlcpipe
