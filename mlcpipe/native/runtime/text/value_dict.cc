#include <algorithm>

#include "text/value.h"

namespace mlcpipe::chat {

namespace {

constexpr uint32_t kFewKeys = 8;  // up to so many are searched one by one

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

}  // namespace

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

}  // namespace mlcpipe::chat
