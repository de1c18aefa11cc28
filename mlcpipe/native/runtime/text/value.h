// Values of a chat template: those of Python that templates can make, in memory that dies with the rendering.
#ifndef MLCPIPE_RUNTIME_TEXT_VALUE_H_
#define MLCPIPE_RUNTIME_TEXT_VALUE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "error.h"
#include "text/value_characters.h"

namespace mlcpipe::chat {

enum class Kind : uint8_t {
  kMissing,  // no value at all: a variable that was never set, an argument that was not given
  kUndefined,
  kNone,
  kBool,
  kInt,  // of 64 bits; larger ones are refused
  kFloat,
  kString,
  kList,
  kTuple,
  kDict,
  kView,  // dict.keys(), .values() or .items()
  kRange,
  kNamespace,
  kMacro,
  kFunction,  // a global one
  kMethod,
  kLoop,
};

// UTF-8 without damage.
struct Str {
  const char* data;
  uint32_t bytes, chars;

  std::string_view view() const { return {data, bytes}; }
  bool ascii() const { return bytes == chars; }
};

// The size of a value when it is written out: shared parts count each time.
struct Weight {
  uint64_t items = 1, text = 0;
  uint32_t depth = 0;
};

struct List;
struct Dict;
struct DictView;
struct Range;
struct Macro;
struct Method;
struct Loop;

struct Value {
  Kind kind = Kind::kMissing;
  bool safe = false;                 // a string that is HTML: Python's Markup
  Kind owner = Kind::kMissing;       // of an undefined value: whose attribute it would be
  union {
    bool truth;
    int64_t integer;
    double number;
    const Str* string;               // of an undefined value: its name, or a sentence if `safe`
    const List* list;                // also of a tuple
    Dict* dict;                      // also of a namespace
    const DictView* view;
    const Range* range;
    const Macro* macro;
    const Method* method;
    Loop* loop;
  };

  Value() : integer(0) {}
  bool is(Kind other) const { return kind == other; }
  bool is_sequence() const { return kind == Kind::kList || kind == Kind::kTuple; }
  bool is_integer() const { return kind == Kind::kInt || kind == Kind::kBool; }
  bool is_number() const { return is_integer() || kind == Kind::kFloat; }
  int64_t as_integer() const { return kind == Kind::kBool ? truth : integer; }
  double as_number() const { return kind == Kind::kFloat ? number : static_cast<double>(as_integer()); }
  std::string_view text() const { return string->view(); }
};

inline Value None() {
  Value value;
  value.kind = Kind::kNone;
  return value;
}
inline Value Bool(bool truth) {
  Value value;
  value.kind = Kind::kBool;
  value.truth = truth;
  return value;
}
inline Value Int(int64_t integer) {
  Value value;
  value.kind = Kind::kInt;
  value.integer = integer;
  return value;
}
inline Value Float(double number) {
  Value value;
  value.kind = Kind::kFloat;
  value.number = number;
  return value;
}

struct Span {
  const Value* items = nullptr;
  size_t size = 0;

  const Value& operator[](size_t i) const { return items[i]; }
  const Value* begin() const { return items; }
  const Value* end() const { return items + size; }
};

struct List {
  Span span;
  Weight weight;
};

struct Range {
  int64_t start, stop, step;
  uint64_t size;
};

struct Method {
  Value self;
  const Str* name;
};

class Heap;

// In order of insertion. Keys are what Python can hash.
struct Dict {
  Value* keys = nullptr;
  Value* values = nullptr;
  uint32_t size = 0, capacity = 0;
  uint32_t* slots = nullptr;  // of more than a few keys: index + 1 at the key's hash
  uint32_t slot_count = 0;
  Weight weight;

  const Value* Find(Heap* heap, const Value& key) const;
  void Set(Heap* heap, const Value& key, const Value& value);

 private:
  int64_t IndexOf(Heap* heap, const Value& key) const;
  void Grow(Heap* heap);
};

struct DictView {
  enum What : uint8_t { kKeys, kValues, kItems } what;
  Dict* dict;
};

// The limits of one rendering, as MAX_TEXT, MAX_ITEMS, … of mlcpipe/runtime/text/template_sandbox.py. Time is counted
// in steps: a node of the program, an item, or `kStepBytes` of text that an operation looks at.
struct Limits {
  static constexpr uint64_t kSteps = 16 << 20;
  static constexpr uint64_t kText = 1 << 20;     // characters of one value, plus 4 times the input
  static constexpr uint64_t kItems = 200'000;    // of one container, plus the input's
  static constexpr uint64_t kBytes = 128 << 20;  // of all values made, plus 32 times the input
  static constexpr uint64_t kInputBytes = 64 << 20;
  static constexpr uint64_t kInputItems = 2'000'000;
  static constexpr uint32_t kDepth = 100;        // of nested containers
  static constexpr uint32_t kCalls = 200;        // of macros within each other
  static constexpr size_t kStackBytes = 384 << 10;
  static constexpr uint64_t kStepBytes = 256;
};

// The memory of one rendering, and the count of what it used.
class Heap {
 public:
  explicit Heap(const Characters& characters) : characters(characters) {}
  Heap(const Heap&) = delete;

  const Characters& characters;
  // Characters of messages, and what stands for them while a template renders: (stand-in, character).
  std::vector<std::pair<uint32_t, uint32_t>> stand_ins;

  // Sets the limits for what follows by the weight of the input.
  void Allow(const Weight& input);

  void Tick(uint64_t steps = 1) {
    if (steps > steps_) Exhausted();
    steps_ -= steps;
  }
  void TickBytes(uint64_t bytes) { Tick(1 + bytes / Limits::kStepBytes); }
  void FitText(uint64_t chars) const;
  void FitItems(uint64_t items) const;
  // Counts memory outside of the heap.
  void Take(uint64_t bytes);

  template <typename T>
  T* New(size_t count = 1) {
    T* made = static_cast<T*>(Allocate(sizeof(T) * count));
    for (size_t i = 0; i < count; ++i) new (made + i) T();
    return made;
  }

  Value String(std::string_view text, bool safe = false);  // copies
  Value Part(const Value& whole, size_t begin, size_t bytes);  // of a string: shares its bytes
  Value Sequence(Kind kind, const Value* items, size_t size);  // a list or tuple, without a copy
  Value Copied(Kind kind, const std::vector<Value>& items);
  Value Pair(const Value& first, const Value& second);
  static Value Undefined(const Value& name, Kind owner = Kind::kMissing);
  Value UndefinedBecause(std::string_view sentence);
  Value Object(Dict* dict, Kind kind = Kind::kDict);
  Value ViewOf(const Value& dict, DictView::What what);

 private:
  std::vector<std::unique_ptr<char[]>> chunks_;
  char* free_ = nullptr;
  size_t free_bytes_ = 0;
  uint64_t steps_ = Limits::kSteps, bytes_ = Limits::kBytes + 32 * Limits::kInputBytes;
  uint64_t max_text_ = Limits::kInputBytes, max_items_ = Limits::kInputItems;

  void* Allocate(size_t bytes);
  [[noreturn]] static void Exhausted();
};

// The three ways in which a rendering ends early: as Python's exception `type`, for a limit, by raise_exception.
[[noreturn]] void Fail(std::string_view type, const std::string& text);
[[noreturn]] void Stop(const std::string& limit);
[[noreturn]] void Refuse(std::string_view text);
[[noreturn]] void FailUndefined(const Value& value);

const char* TypeName(Kind kind);
Weight WeightOf(const Value& value);
bool Truth(const Value& value);
bool Equal(Heap* heap, const Value& left, const Value& right);
// Python's `<`. Raises TypeError for what has no order.
bool Less(Heap* heap, const Value& left, const Value& right);
bool Contains(Heap* heap, const Value& container, const Value& item);
// Where `part` begins in `text`, from byte `from` on, or npos.
size_t Find(Heap* heap, std::string_view text, std::string_view part, size_t from);
size_t LengthOf(const Value& value);
// The items that Python's `for` would give. Raises TypeError.
Span Iterate(Heap* heap, const Value& value);

}  // namespace mlcpipe::chat

#endif  // MLCPIPE_RUNTIME_TEXT_VALUE_H_
