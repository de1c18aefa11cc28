// Python's truth, `==`, `<`, `in`, len and iteration.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "text/value.h"

namespace mlcpipe::chat {

namespace {

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
  if (container.is(Kind::kView) && container.view->what == DictView::kKeys) {
    return container.view->dict->Find(heap, item);
  }
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
