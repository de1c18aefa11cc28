// Filters of sequences and mappings.
#include <algorithm>

#include "text/filters.h"
#include "text/value_access.h"
#include "text/value_format.h"
#include "text/value_strings.h"

namespace mlcpipe::chat {

namespace {

constexpr int64_t kMaxWidth = 10'000;  // MAX_WIDTH of template_sandbox.py

Value ListOf(Heap* heap, const std::vector<Value>& items) { return heap->Copied(Kind::kList, items); }

std::vector<Value> ItemsOf(Heap* heap, const Value& value) {
  Span span = Iterate(heap, value);
  heap->Tick(span.size);
  return {span.begin(), span.end()};
}

// Sorts by keys as Python's sorted: stable, also in reverse.
void SortBy(Heap* heap, std::vector<Value>* items, const std::vector<Value>& keys, bool reverse) {
  std::vector<size_t> order(items->size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  auto less = [&](size_t a, size_t b) { return reverse ? Less(heap, keys[b], keys[a]) : Less(heap, keys[a], keys[b]); };
  std::stable_sort(order.begin(), order.end(), less);
  std::vector<Value> sorted;
  for (size_t index : order) sorted.push_back((*items)[index]);
  *items = std::move(sorted);
}

std::vector<Value> KeysOf(Heap* heap, const std::vector<Value>& items, const Value& attribute, const Value& otherwise,
                          bool case_sensitive) {
  std::vector<Value> keys;
  for (const Value& item : items) keys.push_back(SortKey(heap, item, attribute, otherwise, case_sensitive));
  return keys;
}

Value Batch(Heap* heap, const Value& value, const Value* args) {
  int64_t size = ToIndex(args[0]);
  if (size > kMaxWidth || size < -kMaxWidth) Stop("batch by more than " + std::to_string(kMaxWidth));
  std::vector<Value> lists, part;
  for (const Value& item : ItemsOf(heap, value)) {
    if (static_cast<int64_t>(part.size()) == size) {
      lists.push_back(ListOf(heap, part));
      part.clear();
    }
    part.push_back(item);
  }
  while (!args[1].is(Kind::kNone) && !part.empty() && static_cast<int64_t>(part.size()) < size) part.push_back(args[1]);
  if (!part.empty()) lists.push_back(ListOf(heap, part));
  return ListOf(heap, lists);
}

Value SliceInto(Heap* heap, const Value& value, const Value* args) {
  int64_t count = ToIndex(args[0]);
  if (count > kMaxWidth || count < -kMaxWidth) Stop("slice by more than " + std::to_string(kMaxWidth));
  std::vector<Value> items = ItemsOf(heap, value), lists;
  if (count == 0) Fail("ZeroDivisionError", "integer division or modulo by zero");
  auto size = static_cast<int64_t>(items.size()), slices = std::max<int64_t>(count, 1);
  int64_t each = size / slices, more = size % slices;
  auto begin = items.begin();
  for (int64_t i = 0; i < count; ++i) {
    auto end = begin + each + (i < more);
    std::vector<Value> part(begin, end);
    if (!args[1].is(Kind::kNone) && i >= more) part.push_back(args[1]);
    lists.push_back(ListOf(heap, part));
    begin = end;
  }
  return ListOf(heap, lists);
}

Value DictSort(Heap* heap, const Value& value, const Value* args) {
  std::string_view by = args[1].is(Kind::kString) ? args[1].text() : "";
  if (by != "key" && by != "value") Fail("FilterArgumentError", "You can only sort by either \"key\" or \"value\"");
  if (value.is(Kind::kUndefined)) FailUndefined(value);
  if (!value.is(Kind::kDict)) {
    Fail("AttributeError", std::string("'") + TypeName(value.kind) + "' object has no attribute 'items'");
  }
  std::vector<Value> pairs = ItemsOf(heap, heap->ViewOf(value, DictView::kItems));
  SortBy(heap, &pairs, KeysOf(heap, pairs, Int(by == "value"), None(), Truth(args[0])), Truth(args[2]));
  return ListOf(heap, pairs);
}

Value First(Heap* heap, const Value& value, const Value*) {
  Span items = Iterate(heap, value);
  return items.size ? items[0] : heap->UndefinedBecause("No first item, sequence was empty.");
}

Value Last(Heap* heap, const Value& value, const Value*) {
  if (value.is(Kind::kString) && value.string->bytes) return GetItem(heap, value, Int(-1));
  Span items = Iterate(heap, value);
  return items.size ? items[items.size - 1] : heap->UndefinedBecause("No last item, sequence was empty.");
}

Value GroupBy(Heap* heap, const Value& value, const Value* args) {
  std::vector<Value> items = ItemsOf(heap, value), groups, part;
  bool case_sensitive = Truth(args[2]);
  SortBy(heap, &items, KeysOf(heap, items, args[0], args[1], case_sensitive), false);
  std::vector<Value> keys = KeysOf(heap, items, args[0], args[1], case_sensitive);
  for (size_t i = 0; i < items.size(); ++i) {
    part.push_back(items[i]);
    if (i + 1 < items.size() && Equal(heap, keys[i], keys[i + 1])) continue;
    Value name = SortKey(heap, part[0], args[0], args[1], true);
    groups.push_back(heap->Pair(name, ListOf(heap, part)));
    part.clear();
  }
  return ListOf(heap, groups);
}

Value Pairs(Heap* heap, const Value& value, const Value*) {
  if (value.is(Kind::kUndefined)) return ListOf(heap, {});
  if (!value.is(Kind::kDict)) Fail("TypeError", "Can only get item pairs from a mapping.");
  return ListOf(heap, ItemsOf(heap, heap->ViewOf(value, DictView::kItems)));
}

Value Joined(Heap* heap, const Value& value, const Value* args) {
  std::vector<Value> items = ItemsOf(heap, value);
  for (Value& item : items) item = Lookup(heap, item, args[1]);
  return Join(heap, ToString(heap, args[0]).text(), {items.data(), items.size()});
}

template <bool largest>
Value Extreme(Heap* heap, const Value& value, const Value* args) {
  std::vector<Value> items = ItemsOf(heap, value);
  if (items.empty()) return heap->UndefinedBecause("No aggregated item, sequence was empty.");
  std::vector<Value> keys = KeysOf(heap, items, args[1], None(), Truth(args[0]));
  size_t best = 0;
  for (size_t i = 1; i < items.size(); ++i) {
    if (largest ? Less(heap, keys[best], keys[i]) : Less(heap, keys[i], keys[best])) best = i;
  }
  return items[best];
}

Value Length(Heap*, const Value& value, const Value*) { return Int(static_cast<int64_t>(LengthOf(value))); }

Value Reversed(Heap* heap, const Value& value, const Value*) {
  if (value.is(Kind::kString)) return Slice(heap, value, None(), None(), Int(-1));
  std::vector<Value> items = ItemsOf(heap, value);
  std::reverse(items.begin(), items.end());
  return ListOf(heap, items);
}

// Keys of several attributes, 'a,b', are lists.
Value Sorted(Heap* heap, const Value& value, const Value* args) {
  std::vector<Value> items = ItemsOf(heap, value), keys, names;
  bool several = args[2].is(Kind::kString) && args[2].text().find(',') != std::string_view::npos;
  if (several) {
    std::string_view rest = args[2].text();
    for (size_t end = rest.find(','); end != std::string_view::npos; end = rest.find(',')) {
      names.push_back(heap->String(rest.substr(0, end)));
      rest.remove_prefix(end + 1);
    }
    names.push_back(heap->String(rest));
  }
  for (const Value& item : items) {
    std::vector<Value> key = KeysOf(heap, {item}, args[2], None(), Truth(args[1]));
    if (several) key.clear();
    for (const Value& name : names) key.push_back(SortKey(heap, item, name, None(), Truth(args[1])));
    keys.push_back(several ? ListOf(heap, key) : key[0]);
  }
  SortBy(heap, &items, keys, Truth(args[0]));
  return ListOf(heap, items);
}

Value Sum(Heap* heap, const Value& value, const Value* args) {
  if (!args[1].is_number()) Stop("sum of anything but numbers");
  Value sum = args[1];
  for (const Value& item : ItemsOf(heap, value)) sum = Apply(heap, Operator::kAdd, sum, Lookup(heap, item, args[0]));
  return sum;
}

Value Unique(Heap* heap, const Value& value, const Value* args) {
  Dict* seen = heap->New<Dict>();
  std::vector<Value> kept;
  for (const Value& item : ItemsOf(heap, value)) {
    Value key = SortKey(heap, item, args[1], None(), Truth(args[0]));
    if (seen->Find(heap, key)) continue;
    seen->Set(heap, key, None());
    kept.push_back(item);
  }
  return ListOf(heap, kept);
}

#define MLCPIPE_FILTER [](Heap * heap, const Value& value, const Value*) -> Value

constexpr Filter kFilters[] = {
    {"batch", 2, Batch},
    {"dictsort", 3, DictSort},
    {"first", 0, First},
    {"groupby", 3, GroupBy},
    {"items", 0, Pairs},
    {"join", 2, Joined},
    {"last", 0, Last},
    {"length", 0, Length},
    {"list", 0, MLCPIPE_FILTER { return ListOf(heap, ItemsOf(heap, value)); }},
    {"max", 2, Extreme<true>},
    {"min", 2, Extreme<false>},
    {"reverse", 0, Reversed},
    {"slice", 2, SliceInto},
    {"sort", 3, Sorted},
    {"sum", 2, Sum},
    {"unique", 2, Unique},
};

}  // namespace

Value SortKey(Heap* heap, const Value& item, const Value& attribute, const Value& default_value, bool case_sensitive) {
  Value key = Lookup(heap, item, attribute, default_value);
  if (!key.is(Kind::kString) || case_sensitive) return key;
  heap->TickBytes(8 * uint64_t{key.string->bytes});
  return heap->String(heap->characters.Lower(key.text()));
}

View<Filter> SequenceFilters() { return {kFilters, std::size(kFilters)}; }

}  // namespace mlcpipe::chat
