#include "text/value.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace mlcpipe::chat {

namespace {

constexpr size_t kChunkBytes = 64 << 10;
constexpr size_t kStringBytes = 48;  // about a string's header in Python
constexpr uint32_t kFewKeys = 8;     // up to so many are searched one by one
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

uint64_t HashBytes(const void* data, size_t bytes) {
  uint64_t hash = 1469598103934665603u;
  for (size_t i = 0; i < bytes; ++i) hash = (hash ^ static_cast<const unsigned char*>(data)[i]) * 1099511628211u;
  return hash ^ hash >> 32;
}

// Equal values have the same hash: 1, 1.0 and true are equal.
uint64_t Hash(Heap* heap, const Value& value) {
  switch (value.kind) {
    case Kind::kString:
      heap->TickBytes(value.string->bytes);
      return HashBytes(value.string->data, value.string->bytes);
    case Kind::kFloat:
    case Kind::kBool:
    case Kind::kInt: {
      double number = value.as_number() + 0.0;  // one zero
      return HashBytes(&number, sizeof number);
    }
    case Kind::kTuple: {
      uint64_t hash = 7;
      for (const Value& item : value.list->span) hash = hash * 31 + Hash(heap, item);
      return hash;
    }
    case Kind::kList:
    case Kind::kDict:
    case Kind::kView:
      Fail("TypeError", std::string("unhashable type: '") + TypeName(value.kind) + "'");
    default:
      return static_cast<uint64_t>(value.kind);
  }
}

// -1, 0, 1, or 2 with a NaN: exact, where a conversion of large integers is not.
int Order(const Value& left, const Value& right) {
  if (left.is_integer() && right.is_integer()) {
    int64_t a = left.as_integer(), b = right.as_integer();
    return a < b ? -1 : a > b;
  }
  double a = left.as_number(), b = right.as_number();
  if (std::isnan(a) || std::isnan(b)) return 2;
  if (a != b || left.kind == right.kind || std::fabs(a) >= 0x1p63) return a < b ? -1 : a > b;
  int64_t x = left.is(Kind::kFloat) ? static_cast<int64_t>(a) : left.as_integer();
  int64_t y = right.is(Kind::kFloat) ? static_cast<int64_t>(b) : right.as_integer();
  return x < y ? -1 : x > y;
}

bool EqualSpans(Heap* heap, Span left, Span right) {
  if (left.size != right.size) return false;
  for (size_t i = 0; i < left.size; ++i) {
    if (!Equal(heap, left[i], right[i])) return false;
  }
  return true;
}

bool EqualDicts(Heap* heap, const Dict& left, const Dict& right) {
  if (left.size != right.size) return false;
  for (uint32_t i = 0; i < left.size; ++i) {
    const Value* other = right.Find(heap, left.keys[i]);
    if (!other || !Equal(heap, left.values[i], *other)) return false;
  }
  return true;
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
  throw Failure("the chat template refuses the messages").Found(text.empty() ? " " : Cut(text)).Next("change the messages");
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
  if (chars > max_text_) Stop("a text of " + std::to_string(chars) + " characters, more than " + std::to_string(max_text_));
}

void Heap::FitItems(uint64_t items) const {
  if (items > max_items_) Stop("a list of " + std::to_string(items) + " items, more than " + std::to_string(max_items_));
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

int64_t Dict::IndexOf(Heap* heap, const Value& key) const {
  uint64_t hash = Hash(heap, key);
  if (slot_count == 0) {
    for (uint32_t i = 0; i < size; ++i) {
      if (Equal(heap, keys[i], key)) return i;
    }
    return -1;
  }
  for (uint64_t slot = hash;; ++slot) {
    uint32_t index = slots[slot % slot_count];
    if (index == 0) return -1;
    heap->Tick();
    if (Equal(heap, keys[index - 1], key)) return index - 1;
  }
}

const Value* Dict::Find(Heap* heap, const Value& key) const {
  int64_t index = IndexOf(heap, key);
  return index < 0 ? nullptr : &values[index];
}

void Dict::Grow(Heap* heap) {
  capacity = capacity ? 2 * capacity : 4;
  heap->FitItems(capacity / 2);
  Value *more_keys = heap->New<Value>(capacity), *more_values = heap->New<Value>(capacity);
  std::copy(keys, keys + size, more_keys);
  std::copy(values, values + size, more_values);
  keys = more_keys;
  values = more_values;
  if (capacity <= kFewKeys) return;
  slot_count = 2 * capacity;
  slots = heap->New<uint32_t>(slot_count);
  for (uint32_t i = 0; i < size; ++i) {
    uint64_t slot = Hash(heap, keys[i]);
    while (slots[slot % slot_count]) ++slot;
    slots[slot % slot_count] = i + 1;
  }
}

void Dict::Set(Heap* heap, const Value& key, const Value& value) {
  int64_t index = IndexOf(heap, key);
  if (index >= 0) {
    values[index] = value;
    return;
  }
  if (size == capacity) Grow(heap);
  keys[size] = key;
  values[size] = value;
  ++size;
  if (slot_count == 0) return;
  uint64_t slot = Hash(heap, key);
  while (slots[slot % slot_count]) ++slot;
  slots[slot % slot_count] = size;
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

bool Truth(const Value& value) {
  switch (value.kind) {
    case Kind::kMissing:
    case Kind::kUndefined:
    case Kind::kNone:
      return false;
    case Kind::kBool:
      return value.truth;
    case Kind::kInt:
      return value.integer != 0;
    case Kind::kFloat:
      return value.number != 0;
    case Kind::kString:
    case Kind::kList:
    case Kind::kTuple:
    case Kind::kDict:
    case Kind::kView:
    case Kind::kRange:
      return LengthOf(value) != 0;
    default:
      return true;
  }
}

bool Equal(Heap* heap, const Value& left, const Value& right) {
  heap->Tick();
  if (left.is_number() && right.is_number()) return Order(left, right) == 0;
  if (left.kind != right.kind) return false;
  switch (left.kind) {
    case Kind::kMissing:
    case Kind::kUndefined:
    case Kind::kNone:
      return true;
    case Kind::kString:
      heap->TickBytes(std::min(left.string->bytes, right.string->bytes));
      return left.text() == right.text();
    case Kind::kList:
    case Kind::kTuple:
      return left.list == right.list || EqualSpans(heap, left.list->span, right.list->span);
    case Kind::kDict:
      return left.dict == right.dict || EqualDicts(heap, *left.dict, *right.dict);
    case Kind::kRange:
      return EqualSpans(heap, Iterate(heap, left), Iterate(heap, right));
    case Kind::kFunction:
      return left.integer == right.integer;
    case Kind::kView:
      Stop("a comparison of dict views");
    default:
      return left.macro == right.macro;
  }
}

bool Less(Heap* heap, const Value& left, const Value& right) {
  heap->Tick();
  if (left.is_number() && right.is_number()) return Order(left, right) == -1;
  if (left.is(Kind::kUndefined)) FailUndefined(left);
  if (right.is(Kind::kUndefined)) FailUndefined(right);
  if (left.is(Kind::kString) && right.is(Kind::kString)) {
    heap->TickBytes(std::min(left.string->bytes, right.string->bytes));
    return left.text() < right.text();  // the order of UTF-8 is that of code points
  }
  if (left.is_sequence() && left.kind == right.kind) {
    Span a = left.list->span, b = right.list->span;
    for (size_t i = 0; i < std::min(a.size, b.size); ++i) {
      if (!Equal(heap, a[i], b[i])) return Less(heap, a[i], b[i]);
    }
    return a.size < b.size;
  }
  Fail("TypeError", std::string("'<' not supported between instances of '") + TypeName(left.kind) + "' and '" +
                        TypeName(right.kind) + "'");
}

bool Contains(Heap* heap, const Value& container, const Value& item) {
  if (container.is(Kind::kString)) {
    if (!item.is(Kind::kString)) {
      Fail("TypeError", std::string("'in <string>' requires string as left operand, not ") + TypeName(item.kind));
    }
    heap->TickBytes(container.string->bytes);
    return Find(heap, container.text(), item.text(), 0) != std::string_view::npos;
  }
  if (container.is(Kind::kDict)) return container.dict->Find(heap, item) != nullptr;
  if (container.is(Kind::kView) && container.view->what == DictView::kKeys) return container.view->dict->Find(heap, item);
  Span span = Iterate(heap, container);
  return std::any_of(span.begin(), span.end(), [&](const Value& one) { return Equal(heap, one, item); });
}

size_t Find(Heap* heap, std::string_view text, std::string_view part, size_t from) {
  size_t last = text.size() - part.size(), begin = from;
  if (from > text.size() || part.size() > text.size() - from) return std::string_view::npos;
  while (!part.empty() && from <= last) {
    const void* first = std::memchr(text.data() + from, part[0], last - from + 1);
    if (!first) from = last + 1;
    if (!first) break;
    from = static_cast<size_t>(static_cast<const char*>(first) - text.data());
    heap->TickBytes(part.size());
    if (text.compare(from, part.size(), part) == 0) break;
    ++from;
  }
  heap->Tick((from - begin) / Limits::kStepBytes);
  return from <= last ? from : std::string_view::npos;
}

size_t LengthOf(const Value& value) {
  switch (value.kind) {
    case Kind::kUndefined:
      return 0;
    case Kind::kString:
      return value.string->chars;
    case Kind::kList:
    case Kind::kTuple:
      return value.list->span.size;
    case Kind::kDict:
      return value.dict->size;
    case Kind::kView:
      return value.view->dict->size;
    case Kind::kRange:
      return value.range->size;
    default:
      Fail("TypeError", std::string("object of type '") + TypeName(value.kind) + "' has no len()");
  }
}

Span Iterate(Heap* heap, const Value& value) {
  if (value.is_sequence()) return value.list->span;
  if (value.is(Kind::kDict)) return {value.dict->keys, value.dict->size};
  if (value.is(Kind::kUndefined)) return {};
  bool view = value.is(Kind::kView);
  if (view && value.view->what != DictView::kItems) {
    const Dict& dict = *value.view->dict;
    return {value.view->what == DictView::kKeys ? dict.keys : dict.values, dict.size};
  }
  if (!view && !value.is(Kind::kString) && !value.is(Kind::kRange)) {
    Fail("TypeError", std::string("'") + TypeName(value.kind) + "' object is not iterable");
  }
  size_t size = LengthOf(value), at = 0;
  heap->FitItems(size);
  heap->Tick(size);
  Value* items = heap->New<Value>(size);
  for (size_t i = 0; i < size; ++i) {
    if (view) items[i] = heap->Pair(value.view->dict->keys[i], value.view->dict->values[i]);
    if (value.is(Kind::kRange)) items[i] = Int(value.range->start + static_cast<int64_t>(i) * value.range->step);
    if (!value.is(Kind::kString)) continue;
    size_t begin = at;
    utf8::Next(value.text(), &at);
    items[i] = heap->Part(value, begin, at - begin);
    items[i].safe = false;
  }
  return {items, size};
}

}  // namespace mlcpipe::chat
