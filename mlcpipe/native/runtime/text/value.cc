#include "text/value.h"

#include <algorithm>
#include <cstring>

namespace mlcpipe::chat {

namespace {

constexpr size_t kChunkBytes = 64 << 10;
constexpr size_t kStringBytes = 48;  // about a string's header in Python
constexpr size_t kMaxFound = 300;    // characters of a reason

Error Failure(std::string what) { return Error(Code::kTemplate, std::move(what)); }

std::string Cut(std::string_view text) { return std::string(text.substr(0, ByteOf(text, kMaxFound))); }

Weight& Add(Weight* sum, const Value& part) {
  Weight weight = WeightOf(part);
  sum->items += weight.items;
  sum->text += weight.text;
  sum->depth = std::max(sum->depth, weight.depth + 1);
  return *sum;
}

}  // namespace

void Fail(std::string_view type, const std::string& text) {
  throw Failure("the chat template failed")
      .Found(Cut(std::string(type) + ": " + text))
      .Next("check chat_template in the checkpoint, or use `generate` to continue plain text");
}

void Stop(const std::string& limit) {
  throw Failure("the chat template was stopped")
      .Expected("a template within the limits of chat templates")
      .Found(Cut(limit))
      .Next("use the template of the original model, or `generate` to continue plain text");
}

void Refuse(std::string_view text) {
  throw Failure("the chat template refuses the messages")
      .Found(text.empty() ? " " : Cut(text))
      .Next("change the messages");
}

void FailUndefined(const Value& value) {
  std::string name(value.text());
  if (value.safe) Fail("UndefinedError", name);
  if (value.owner == Kind::kMissing) Fail("UndefinedError", "'" + name + "' is undefined");
  Fail("UndefinedError", std::string("'") + TypeName(value.owner) + " object' has no attribute '" + name + "'");
}

const char* TypeName(Kind kind) {
  static const char* const kNames[] = {"missing", "Undefined", "NoneType", "bool",  "int",       "float",
                                       "str",     "list",      "tuple",    "dict",  "dict view", "range",
                                       "Namespace", "Macro",   "function", "builtin_function_or_method", "LoopContext"};
  return kNames[static_cast<int>(kind)];
}

void Heap::Exhausted() { Stop("more than " + std::to_string(Limits::kSteps) + " steps"); }

void Heap::Allow(const Weight& input) {
  max_text_ = Limits::kText + 4 * input.text;
  max_items_ = Limits::kItems + input.items;
  bytes_ = Limits::kBytes + 32 * input.text;
}

void Heap::FitText(uint64_t chars) const {
  if (chars > max_text_) {
    Stop("a text of " + std::to_string(chars) + " characters, more than " + std::to_string(max_text_));
  }
}

void Heap::FitItems(uint64_t items) const {
  if (items > max_items_) {
    Stop("a list of " + std::to_string(items) + " items, more than " + std::to_string(max_items_));
  }
}

void Heap::Take(uint64_t bytes) {
  if (bytes > bytes_) Stop("more than " + std::to_string(Limits::kBytes >> 20) + " MiB of values");
  bytes_ -= bytes;
}

void* Heap::Allocate(size_t bytes) {
  bytes = (bytes + 7) / 8 * 8;
  Take(bytes);
  if (bytes > free_bytes_) {
    size_t chunk = std::max(bytes, kChunkBytes);
    chunks_.emplace_back(new char[chunk]);
    if (chunk > kChunkBytes) return chunks_.back().get();  // what is left of the chunk before it stays in use
    free_ = chunks_.back().get();
    free_bytes_ = chunk;
  }
  char* made = free_;
  free_ += bytes;
  free_bytes_ -= bytes;
  return made;
}

Value Heap::String(std::string_view text, bool safe) {
  TickBytes(text.size());
  size_t chars = CountChars(text);
  FitText(chars);
  Take(kStringBytes);
  char* data = static_cast<char*>(Allocate(text.size()));
  if (!text.empty()) std::memcpy(data, text.data(), text.size());
  Str* made = New<Str>();
  *made = {data, static_cast<uint32_t>(text.size()), static_cast<uint32_t>(chars)};
  Value value;
  value.kind = Kind::kString;
  value.safe = safe;
  value.string = made;
  return value;
}

Value Heap::Part(const Value& whole, size_t begin, size_t bytes) {
  if (bytes == whole.string->bytes) return whole;
  TickBytes(bytes);
  Take(kStringBytes + bytes);  // as if copied
  Str* made = New<Str>();
  size_t chars = whole.string->ascii() ? bytes : CountChars({whole.string->data + begin, bytes});
  *made = {whole.string->data + begin, static_cast<uint32_t>(bytes), static_cast<uint32_t>(chars)};
  Value value = whole;
  value.string = made;
  return value;
}

Value Heap::Sequence(Kind kind, const Value* items, size_t size) {
  Tick(1 + size / 8);
  List* made = New<List>();
  made->span = {items, size};
  made->weight.depth = 1;
  for (const Value& item : made->span) Add(&made->weight, item);
  FitItems(made->weight.items);
  FitText(made->weight.text);
  if (made->weight.depth > Limits::kDepth) Stop("lists nested deeper than " + std::to_string(Limits::kDepth));
  Value value;
  value.kind = kind;
  value.list = made;
  return value;
}

Value Heap::Copied(Kind kind, const std::vector<Value>& items) {
  FitItems(items.size());
  Value* copy = New<Value>(items.size());
  std::copy(items.begin(), items.end(), copy);
  return Sequence(kind, copy, items.size());
}

Value Heap::Pair(const Value& first, const Value& second) {
  Value* items = New<Value>(2);
  items[0] = first;
  items[1] = second;
  return Sequence(Kind::kTuple, items, 2);
}

Value Heap::Undefined(const Value& name, Kind owner) {
  Value value = name;
  value.kind = Kind::kUndefined;
  value.safe = false;
  value.owner = owner;
  return value;
}

Value Heap::UndefinedBecause(std::string_view sentence) {
  Value value = Undefined(String(sentence));
  value.safe = true;
  return value;
}

Value Heap::Object(Dict* dict, Kind kind) {
  Value value;
  value.kind = kind;
  value.dict = dict;
  if (kind != Kind::kDict) return value;
  Tick(1 + dict->size / 4);
  dict->weight = Weight();
  dict->weight.depth = 1;
  for (uint32_t i = 0; i < dict->size; ++i) Add(&Add(&dict->weight, dict->keys[i]), dict->values[i]);
  FitItems(dict->weight.items);
  FitText(dict->weight.text);
  if (dict->weight.depth > Limits::kDepth) Stop("lists nested deeper than " + std::to_string(Limits::kDepth));
  return value;
}

Value Heap::ViewOf(const Value& dict, DictView::What what) {
  DictView* made = New<DictView>();
  *made = {what, dict.dict};
  Value value;
  value.kind = Kind::kView;
  value.view = made;
  return value;
}

Weight WeightOf(const Value& value) {
  Weight weight;
  if (value.is(Kind::kString)) weight.text = value.string->chars;
  if (value.is(Kind::kInt)) weight.text = value.integer > 99 || value.integer < -99 ? 8 : 2;
  if (value.is_sequence()) weight = value.list->weight;
  if (value.is(Kind::kDict)) weight = value.dict->weight;
  if (value.is(Kind::kView)) weight = value.view->dict->weight;
  return weight;
}

}  // namespace mlcpipe::chat
