// The tests of jinja2 (`x is defined`), and the search for filters and tests.
#include "text/filters.h"
#include "text/value_access.h"

namespace mlcpipe::chat {

namespace {

bool IsRest(Heap* heap, const Value& value, const Value& divisor, int64_t rest) {
  return Equal(heap, Apply(heap, Operator::kModulo, value, divisor), Int(rest));
}

bool IsSame(const Value& value, const Value& other) {
  if (value.kind != other.kind) return false;
  if (value.is(Kind::kNone)) return true;
  if (value.is(Kind::kBool)) return value.truth == other.truth;
  if (value.is_number() || value.is(Kind::kString)) Stop("sameas of numbers or texts");
  return value.list == other.list;
}

bool IsIterable(const Value& value) {
  switch (value.kind) {
    case Kind::kUndefined:
    case Kind::kString:
    case Kind::kList:
    case Kind::kTuple:
    case Kind::kDict:
    case Kind::kView:
    case Kind::kRange:
    case Kind::kLoop:
      return true;
    default:
      return false;
  }
}

bool IsCallable(const Value& value) { return value.kind >= Kind::kMacro || value.is(Kind::kUndefined); }

bool IsSequence(const Value& value) { return IsIterable(value) && !value.is(Kind::kView) && !value.is(Kind::kLoop); }

#define MLCPIPE_TEST(condition)                                      \
  [](Heap* heap, const Value& value, const Value* args) -> bool {    \
    (void)heap, (void)value, (void)args;                             \
    return condition;                                                \
  }
#define MLCPIPE_COMPARE(op) MLCPIPE_TEST(Compare(heap, Comparison::op, value, args[0]))

constexpr Test kTests[] = {
    {"boolean", 0, MLCPIPE_TEST(value.is(Kind::kBool))},
    {"callable", 0, MLCPIPE_TEST(IsCallable(value))},
    {"defined", 0, MLCPIPE_TEST(!value.is(Kind::kUndefined))},
    {"divisibleby", 1, MLCPIPE_TEST(IsRest(heap, value, args[0], 0))},
    {"eq", 1, MLCPIPE_COMPARE(kEqual)},
    {"escaped", 0, MLCPIPE_TEST(value.is(Kind::kString) && value.safe)},
    {"even", 0, MLCPIPE_TEST(IsRest(heap, value, Int(2), 0))},
    {"false", 0, MLCPIPE_TEST(value.is(Kind::kBool) && !value.truth)},
    {"float", 0, MLCPIPE_TEST(value.is(Kind::kFloat))},
    {"ge", 1, MLCPIPE_COMPARE(kGreaterEqual)},
    {"gt", 1, MLCPIPE_COMPARE(kGreater)},
    {"in", 1, MLCPIPE_COMPARE(kIn)},
    {"integer", 0, MLCPIPE_TEST(value.is(Kind::kInt))},
    {"iterable", 0, MLCPIPE_TEST(IsIterable(value))},
    {"le", 1, MLCPIPE_COMPARE(kLessEqual)},
    {"lt", 1, MLCPIPE_COMPARE(kLess)},
    {"mapping", 0, MLCPIPE_TEST(value.is(Kind::kDict))},
    {"ne", 1, MLCPIPE_COMPARE(kUnequal)},
    {"none", 0, MLCPIPE_TEST(value.is(Kind::kNone))},
    {"number", 0, MLCPIPE_TEST(value.is_number())},
    {"odd", 0, MLCPIPE_TEST(IsRest(heap, value, Int(2), 1))},
    {"sameas", 1, MLCPIPE_TEST(IsSame(value, args[0]))},
    {"sequence", 0, MLCPIPE_TEST(IsSequence(value))},
    {"string", 0, MLCPIPE_TEST(value.is(Kind::kString))},
    {"true", 0, MLCPIPE_TEST(value.is(Kind::kBool) && value.truth)},
    {"undefined", 0, MLCPIPE_TEST(value.is(Kind::kUndefined))},
};

template <typename Entries>
auto FindIn(const Entries& entries, std::string_view name, uint32_t parameters) -> decltype(&*std::begin(entries)) {
  for (const auto& entry : entries) {
    if (name == entry.name && parameters == entry.parameters) return &entry;
  }
  return nullptr;
}

}  // namespace

const Filter* FindFilter(std::string_view name, uint32_t parameters) {
  const Filter* found = FindIn(TextFilters(), name, parameters);
  return found ? found : FindIn(SequenceFilters(), name, parameters);
}

const Test* FindTest(std::string_view name, uint32_t parameters) { return FindIn(kTests, name, parameters); }

}  // namespace mlcpipe::chat
