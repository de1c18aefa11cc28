#include "text/value_access.h"

#include <algorithm>

#include "text/value_format.h"
#include "text/value_methods.h"

namespace mlcpipe::chat {

namespace {

constexpr size_t kMaxParts = 1000;  // of an attribute

// The items of a slice: the first, how many, and how far apart.
struct Cut {
  int64_t start, count, step;
};

Cut CutOf(int64_t size, const Value& start, const Value& stop, const Value& step) {
  auto index = [&](const Value& value, int64_t otherwise, int64_t low, int64_t high) {
    if (value.is(Kind::kNone)) return otherwise;
    if (!value.is_integer()) {
      if (value.is(Kind::kUndefined)) FailUndefined(value);
      Fail("TypeError", "slice indices must be integers or None or have an __index__ method");
    }
    int64_t at = value.as_integer();
    return std::min(std::max(at < 0 ? at + size : at, low), high);
  };
  int64_t by = step.is(Kind::kNone) ? 1 : step.is_integer() ? step.as_integer() : 0;
  if (!step.is(Kind::kNone) && !step.is_integer()) Fail("TypeError", "slice indices must be integers or None");
  if (by == 0) Fail("ValueError", "slice step cannot be zero");
  by = std::min(std::max(by, -(size + 1)), size + 1);  // no larger step gives more
  int64_t low = by < 0 ? -1 : 0, high = by < 0 ? size - 1 : size;
  int64_t first = index(start, by < 0 ? high : low, low, high), last = index(stop, by < 0 ? low : high, low, high);
  int64_t count = by < 0 ? (first - last - by - 1) / -by : (last - first + by - 1) / by;
  return {first, std::max<int64_t>(count, 0), by};
}

Value CutText(Heap* heap, const Value& text, const Cut& cut) {
  std::string_view all = text.text();
  heap->TickBytes(all.size());
  bool ascii = text.string->ascii();
  auto byte = [&](int64_t index) {
    auto chars = static_cast<size_t>(index);
    return ascii ? chars : ByteOf(all, chars);
  };
  if (cut.step == 1) {
    size_t begin = byte(cut.start), end = byte(cut.start + cut.count);
    return heap->Part(text, begin, end - begin);
  }
  std::vector<size_t> begins;
  for (size_t at = 0; at < all.size(); utf8::Next(all, &at)) begins.push_back(at);
  begins.push_back(all.size());
  std::string made;
  for (int64_t i = 0; i < cut.count; ++i) {
    auto at = static_cast<size_t>(cut.start + i * cut.step);
    made += all.substr(begins[at], begins[at + 1] - begins[at]);
  }
  return heap->String(made, text.safe);
}

const Value* ItemAt(const Value& sequence, int64_t index) {
  auto size = static_cast<int64_t>(sequence.list->span.size);
  if (index < 0) index += size;
  return index >= 0 && index < size ? &sequence.list->span[static_cast<size_t>(index)] : nullptr;
}

// The item at an integer, or a missing value.
Value Indexed(Heap* heap, const Value& object, int64_t index) {
  auto size = static_cast<int64_t>(LengthOf(object));
  if (object.is_sequence()) {
    const Value* item = ItemAt(object, index);
    return item ? *item : Value();
  }
  if (index < 0) index += size;
  if (index < 0 || index >= size) return Value();
  if (object.is(Kind::kRange)) return Int(object.range->start + index * object.range->step);
  return CutText(heap, object, {index, 1, 1});
}

}  // namespace

bool IsHashable(const Value& value) {
  if (value.is(Kind::kTuple)) return std::all_of(value.list->span.begin(), value.list->span.end(), IsHashable);
  return !value.is(Kind::kList) && !value.is(Kind::kDict) && !value.is(Kind::kView);
}

int64_t ToIndex(const Value& value) {
  if (value.is(Kind::kUndefined)) FailUndefined(value);
  if (!value.is_integer()) {
    Fail("TypeError", std::string("'") + TypeName(value.kind) + "' object cannot be interpreted as an integer");
  }
  return value.as_integer();
}

Value RangeOf(Heap* heap, int64_t start, int64_t stop, int64_t step) {
  Range* made = heap->New<Range>();
  *made = {start, stop, step, 0};
  bool any = step > 0 ? start < stop : start > stop;
  uint64_t distance = step > 0 ? static_cast<uint64_t>(stop) - static_cast<uint64_t>(start)
                               : static_cast<uint64_t>(start) - static_cast<uint64_t>(stop);
  uint64_t by = step > 0 ? static_cast<uint64_t>(step) : 0 - static_cast<uint64_t>(step);
  made->size = any ? (distance - 1) / by + 1 : 0;
  Value value;
  value.kind = Kind::kRange;
  value.range = made;
  return value;
}

Value GetAttr(Heap* heap, const Value& object, const Value& name) {
  if (object.is(Kind::kUndefined)) FailUndefined(object);
  Attribute found = AttributeOf(object.kind, name.text());
  if (found == Attribute::kMethod) {
    Method* method = heap->New<Method>();
    *method = {object, name.string};
    Value value;
    value.kind = Kind::kMethod;
    value.method = method;
    return value;
  }
  if (found == Attribute::kNone && (object.is(Kind::kDict) || object.is(Kind::kNamespace))) {
    const Value* item = object.dict->Find(heap, name);
    if (item) return *item;
  }
  return Heap::Undefined(name, object.kind);
}

Value GetItem(Heap* heap, const Value& object, const Value& key) {
  if (object.is(Kind::kUndefined)) FailUndefined(object);
  if (object.is(Kind::kDict) && IsHashable(key)) {
    const Value* item = object.dict->Find(heap, key);
    if (item) return *item;
  }
  bool indexed = object.is_sequence() || object.is(Kind::kString) || object.is(Kind::kRange);
  if (indexed && key.is_integer()) {
    Value item = Indexed(heap, object, key.as_integer());
    if (!item.is(Kind::kMissing)) return item;
  }
  if (object.is(Kind::kLoop)) Stop("an attribute of a loop by its name");
  if (key.is(Kind::kString) && !object.is(Kind::kDict)) return GetAttr(heap, object, key);
  if (key.is(Kind::kString) && AttributeOf(object.kind, key.text()) == Attribute::kMethod) {
    return GetAttr(heap, object, key);
  }
  return Heap::Undefined(key.is(Kind::kString) ? key : heap->String(Repr(heap, key)), object.kind);
}

Value Slice(Heap* heap, const Value& object, const Value& start, const Value& stop, const Value& step) {
  if (object.is(Kind::kUndefined)) FailUndefined(object);
  bool text = object.is(Kind::kString);
  if (!text && !object.is_sequence() && !object.is(Kind::kRange)) {
    Fail("TypeError", std::string("'") + TypeName(object.kind) + "' object is not subscriptable");
  }
  Cut cut = CutOf(static_cast<int64_t>(LengthOf(object)), start, stop, step);
  if (text) return CutText(heap, object, cut);
  if (object.is(Kind::kRange)) {
    const Range& range = *object.range;
    int64_t by = range.step * cut.step, first = range.start + cut.start * range.step;
    return RangeOf(heap, first, first + cut.count * by, by);
  }
  Value* items = heap->New<Value>(static_cast<size_t>(cut.count));
  for (int64_t i = 0; i < cut.count; ++i) items[i] = object.list->span[static_cast<size_t>(cut.start + i * cut.step)];
  return heap->Sequence(object.kind, items, static_cast<size_t>(cut.count));
}

Value Lookup(Heap* heap, const Value& item, const Value& attribute, const Value& otherwise) {
  if (attribute.is(Kind::kNone)) return item;
  auto step = [&](const Value& from, const Value& key) {
    Value found = GetItem(heap, from, key);
    return found.is(Kind::kUndefined) && !otherwise.is(Kind::kNone) ? otherwise : found;
  };
  if (!attribute.is(Kind::kString)) return step(item, attribute);
  std::string_view rest = attribute.text();
  Value value = item;
  for (size_t parts = 0;; ++parts) {
    if (parts == kMaxParts) Stop("an attribute of more than " + std::to_string(kMaxParts) + " parts");
    size_t end = std::min(rest.find('.'), rest.size());
    std::string_view part = rest.substr(0, end);
    bool number = !part.empty() && part.size() < 10 && part.find_first_not_of("0123456789") == std::string_view::npos;
    Value key = number ? Int(std::stol(std::string(part))) : heap->String(part);
    value = step(value, key);
    if (end == rest.size()) return value;
    rest.remove_prefix(end + 1);
  }
}

}  // namespace mlcpipe::chat
