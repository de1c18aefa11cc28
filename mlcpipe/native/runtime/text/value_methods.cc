#include "text/value_methods.h"

#include <algorithm>

#include "text/value_access.h"
#include "text/value_strings.h"

namespace mlcpipe::chat {

namespace {

struct Entry {
  const char* name;
  uint8_t least, most;  // arguments
  bool escapes;         // arguments, where the text is safe
  Value (*call)(Heap*, const Value& self, const Args& args);
};

template <Class... kinds>
Value AllAre(Heap* heap, const Value& self, const Args&) {
  heap->TickBytes(self.string->bytes * 8);
  std::string_view text = self.text();
  for (size_t at = 0; at < text.size();) {
    uint32_t code = utf8::Next(text, &at);
    if (!(heap->characters.Is(kinds, code) || ...)) return Bool(false);
  }
  return Bool(!text.empty());
}

Value AllSpaces(Heap*, const Value& self, const Args&) {
  std::string_view text = self.text();
  for (size_t at = 0; at < text.size();) {
    if (!IsSpace(utf8::Next(text, &at))) return Bool(false);
  }
  return Bool(!text.empty());
}

template <std::string (Characters::*change)(std::string_view) const>
Value Changed(Heap* heap, const Value& self, const Args&) {
  heap->TickBytes(8 * uint64_t{self.string->bytes});
  return heap->String((heap->characters.*change)(self.text()), self.safe);
}

std::string_view FillOf(const Args& args) {
  if (args.size() < 2) return " ";
  std::string_view fill = TextOf(args[1]);
  if (CountChars(fill) != 1) Fail("TypeError", "The fill character must be exactly one character long");
  return fill;
}

#define MLCPIPE_CALL [](Heap * heap, const Value& self, const Args& args) -> Value
#define MLCPIPE_UNUSED (void)heap, (void)self, (void)args

// By name. A method that is in no list here is refused when a template that calls it is compiled.
constexpr Entry kStringMethods[] = {
    {"capitalize", 0, 0, true, Changed<&Characters::Capitalize>},
    {"center", 1, 2, true, MLCPIPE_CALL { return Center(heap, self, ToIndex(args[0]), FillOf(args), '^'); }},
    {"count", 1, 3, false, CountIn},
    {"endswith", 1, 3, false, MLCPIPE_CALL { return Begins(heap, self, args, true); }},
    {"find", 1, 3, false, MLCPIPE_CALL { return FindIn(heap, self, args, false); }},
    {"index", 1, 3, false, MLCPIPE_CALL { return IndexIn(heap, self, args, false); }},
    {"isalnum", 0, 0, false, AllAre<Class::kAlpha, Class::kDecimal, Class::kDigit, Class::kNumeric>},
    {"isalpha", 0, 0, false, AllAre<Class::kAlpha>},
    {"isascii", 0, 0, false, MLCPIPE_CALL { MLCPIPE_UNUSED; return Bool(self.string->ascii()); }},
    {"isdecimal", 0, 0, false, AllAre<Class::kDecimal>},
    {"isdigit", 0, 0, false, AllAre<Class::kDigit>},
    {"isnumeric", 0, 0, false, AllAre<Class::kNumeric>},
    {"isspace", 0, 0, false, AllSpaces},
    {"join", 1, 1, false, MLCPIPE_CALL {
       if (self.safe) Stop("join with a safe text");
       Span parts = Iterate(heap, args[0]);
       for (const Value& part : parts) TextOf(part);
       return Join(heap, self.text(), parts);
     }},
    {"ljust", 1, 2, true, MLCPIPE_CALL { return Center(heap, self, ToIndex(args[0]), FillOf(args), '<'); }},
    {"lower", 0, 0, true, Changed<&Characters::Lower>},
    {"lstrip", 0, 1, true, MLCPIPE_CALL { return Strip(heap, self, args.empty() ? None() : args[0], 1); }},
    {"partition", 1, 1, false, MLCPIPE_CALL { return Partition(heap, self, args, false); }},
    {"removeprefix", 1, 1, true, MLCPIPE_CALL { return Without(heap, self, args, false); }},
    {"removesuffix", 1, 1, true, MLCPIPE_CALL { return Without(heap, self, args, true); }},
    {"replace", 2, 3, true, MLCPIPE_CALL { return Replace(heap, self, args[0], args[1], CountOf(args, 2)); }},
    {"rfind", 1, 3, false, MLCPIPE_CALL { return FindIn(heap, self, args, true); }},
    {"rindex", 1, 3, false, MLCPIPE_CALL { return IndexIn(heap, self, args, true); }},
    {"rjust", 1, 2, true, MLCPIPE_CALL { return Center(heap, self, ToIndex(args[0]), FillOf(args), '>'); }},
    {"rpartition", 1, 1, false, MLCPIPE_CALL { return Partition(heap, self, args, true); }},
    {"rsplit", 0, 2, false, MLCPIPE_CALL { return Split(heap, self, args, true); }},
    {"rstrip", 0, 1, true, MLCPIPE_CALL { return Strip(heap, self, args.empty() ? None() : args[0], 2); }},
    {"split", 0, 2, false, MLCPIPE_CALL { return Split(heap, self, args, false); }},
    {"splitlines", 0, 1, false, MLCPIPE_CALL {
       bool keep_ends = !args.empty() && Truth(args[0]);
       return heap->Copied(Kind::kList, SplitLines(heap, self, keep_ends));
     }},
    {"startswith", 1, 3, false, MLCPIPE_CALL { return Begins(heap, self, args, false); }},
    {"strip", 0, 1, true, MLCPIPE_CALL { return Strip(heap, self, args.empty() ? None() : args[0], 3); }},
    {"title", 0, 0, true, Changed<&Characters::Title>},
    {"upper", 0, 0, true, Changed<&Characters::Upper>},
    {"zfill", 1, 1, true, Zeros},
};

constexpr Entry kDictMethods[] = {
    {"copy", 0, 0, false, MLCPIPE_CALL { MLCPIPE_UNUSED; return self; }},
    {"get", 1, 2, false, MLCPIPE_CALL {
       const Value* found = self.dict->Find(heap, args[0]);
       return found ? *found : args.size() > 1 ? args[1] : None();
     }},
    {"items", 0, 0, false, MLCPIPE_CALL { MLCPIPE_UNUSED; return heap->ViewOf(self, DictView::kItems); }},
    {"keys", 0, 0, false, MLCPIPE_CALL { MLCPIPE_UNUSED; return heap->ViewOf(self, DictView::kKeys); }},
    {"values", 0, 0, false, MLCPIPE_CALL { MLCPIPE_UNUSED; return heap->ViewOf(self, DictView::kValues); }},
};

constexpr Entry kListMethods[] = {
    {"copy", 0, 0, false, MLCPIPE_CALL { MLCPIPE_UNUSED; return self; }},
    {"count", 1, 1, false, MLCPIPE_CALL {
       Span span = self.list->span;
       return Int(std::count_if(span.begin(), span.end(), [&](const Value& one) { return Equal(heap, one, args[0]); }));
     }},
    {"index", 1, 1, false, MLCPIPE_CALL {
       Span span = self.list->span;
       auto found = std::find_if(span.begin(), span.end(), [&](const Value& one) { return Equal(heap, one, args[0]); });
       if (found == span.end()) Fail("ValueError", "is not in list");
       return Int(found - span.begin());
     }},
};

// Other methods of Python's types: `format` has a function of its own, the sandbox forbids the last ones.
constexpr const char* kUncovered[] = {"casefold",    "format",  "isidentifier", "islower",
                                      "isprintable", "istitle", "isupper",      "swapcase"};
constexpr const char* kForbiddenOfString[] = {"encode", "expandtabs", "format_map", "maketrans", "translate"};
constexpr const char* kForbiddenOfDict[] = {"clear", "fromkeys", "pop", "popitem", "setdefault", "update"};

template <typename Names>
bool Has(const Names& names, std::string_view name) {
  return std::any_of(std::begin(names), std::end(names), [&](const char* one) { return name == one; });
}

const Entry* FindEntry(Kind kind, std::string_view name) {
  auto find = [&](const auto& entries) -> const Entry* {
    for (const Entry& entry : entries) {
      if (name == entry.name) return &entry;
    }
    return nullptr;
  };
  if (kind == Kind::kString) return find(kStringMethods);
  if (kind == Kind::kDict) return find(kDictMethods);
  const Entry* found = kind == Kind::kList || kind == Kind::kTuple ? find(kListMethods) : nullptr;
  return kind == Kind::kTuple && found && name == "copy" ? nullptr : found;
}

// Positional arguments, with the names of split, rsplit and splitlines in their places.
Args Bound(std::string_view name, const Arguments& arguments) {
  Args args = arguments.positional;
  for (const auto& [key, value] : arguments.named) {
    bool splits = name == "split" || name == "rsplit";
    bool first = (splits && key == "sep") || (name == "splitlines" && key == "keepends");
    bool second = splits && key == "maxsplit";
    size_t place = second ? 1 : 0;
    if ((!first && !second) || place < args.size()) {
      Fail("TypeError", std::string(name) + "() takes no such keyword argument");
    }
    while (args.size() < place) args.push_back(None());
    args.push_back(value);
  }
  return args;
}

}  // namespace

Attribute AttributeOf(Kind kind, std::string_view name) {
  if (name.size() > 4 && name.substr(0, 2) == "__" && name.substr(name.size() - 2) == "__") {
    return Attribute::kForbidden;
  }
  if (FindEntry(kind, name)) return Attribute::kMethod;
  if (kind == Kind::kString && Has(kUncovered, name)) return Attribute::kMethod;
  bool forbidden = kind == Kind::kString && Has(kForbiddenOfString, name);
  forbidden = forbidden || (kind == Kind::kDict && Has(kForbiddenOfDict, name));
  return forbidden ? Attribute::kForbidden : Attribute::kNone;
}

Value CallMethod(Heap* heap, const Method& method, const Arguments& arguments) {
  std::string_view name = method.name->view();
  const Value& self = method.self;
  if (self.is(Kind::kString) && name == "format") return BraceFormat(heap, self, arguments);
  const Entry* entry = FindEntry(self.kind, name);
  if (!entry) Stop("the method " + std::string(name));
  Args args = Bound(name, arguments);
  if (args.size() < entry->least || args.size() > entry->most) {
    Fail("TypeError", std::string(name) + "() takes other arguments, " + std::to_string(args.size()) + " given");
  }
  if (entry->escapes && self.safe) {
    for (Value& value : args) value = value.is(Kind::kString) ? Escape(heap, value) : value;
  }
  heap->TickBytes(self.is(Kind::kString) ? self.string->bytes : 0);
  return entry->call(heap, self, args);
}

}  // namespace mlcpipe::chat
