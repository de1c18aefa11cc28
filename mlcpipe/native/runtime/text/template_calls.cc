// Calls: macros, methods, and the functions that a chat template has.
#include <algorithm>

#include "text/template_eval.h"
#include "text/value_access.h"
#include "text/value_methods.h"

namespace mlcpipe::chat {

namespace {

constexpr int64_t kMaxRange = 100'000;  // MAX_RANGE of jinja2's sandbox
constexpr int64_t kMaxBound = int64_t{1} << 60;

constexpr std::string_view kFunctions[] = {"range", "dict", "namespace", "raise_exception", "strftime_now"};

}  // namespace

std::string Describe(Heap* heap, const Value& value) {
  if (value.is(Kind::kMacro)) return "<Macro " + Repr(heap, heap->String(value.macro->name)) + ">";
  if (value.loop->length < 0) Stop("a loop written as text");
  return "<LoopContext " + std::to_string(value.loop->index0 + 1) + "/" + std::to_string(value.loop->length) + ">";
}

Value Evaluator::Resolve(const Value& name) {
  const Value* found = variables_.Find(heap_, name);
  if (found) return *found;
  auto function = std::find(std::begin(kFunctions), std::end(kFunctions), name.text());
  if (function == std::end(kFunctions)) return Value();
  Value value = Int(function - std::begin(kFunctions));
  value.kind = Kind::kFunction;
  return value;
}

Arguments Evaluator::EvalArguments(uint32_t node, Frame* frame) {
  const uint32_t* at = program_.operands(node);
  Arguments arguments;
  for (uint32_t i = 2; i < program_.count(node); i += 2) {
    Value value = Eval(at[i + 1], frame);
    if (at[i] == 0) {
      arguments.positional.push_back(value);
    } else {
      arguments.named.emplace_back(program_.string(at[i]), value);
    }
  }
  if (at[0]) {
    Value more = Eval(at[0] - 1, frame);
    for (const Value& value : Iterate(heap_, more)) arguments.positional.push_back(value);
  }
  if (at[1]) {
    Value more = Eval(at[1] - 1, frame);
    if (!more.is(Kind::kDict)) Fail("TypeError", "argument after ** must be a mapping");
    for (uint32_t i = 0; i < more.dict->size; ++i) {
      if (!more.dict->keys[i].is(Kind::kString)) Fail("TypeError", "keywords must be strings");
      std::string_view name = more.dict->keys[i].text();
      if (arguments.Named(name)) Fail("TypeError", "got multiple values for keyword argument");
      arguments.named.emplace_back(name, more.dict->values[i]);
    }
  }
  heap_->Tick(arguments.positional.size() + arguments.named.size() * (1 + arguments.named.size() / 8));
  return arguments;
}

Value Evaluator::Call(const Value& callee, const Arguments& arguments) {
  switch (callee.kind) {
    case Kind::kMacro:
      return CallMacro(*callee.macro, arguments);
    case Kind::kFunction:
      return CallFunction(static_cast<Function>(callee.integer), arguments);
    case Kind::kLoop:
      return CallLoop(callee.loop, arguments);
    case Kind::kMethod:
      if (callee.method->self.is(Kind::kLoop)) {
        return CallLoopMethod(callee.method->self.loop, callee.method->name->view(), arguments);
      }
      return CallMethod(heap_, *callee.method, arguments);
    case Kind::kUndefined:
      FailUndefined(callee);
    default:
      Fail("TypeError", std::string("'") + TypeName(callee.kind) + "' object is not callable");
  }
}

// Parameters take positional arguments, then named ones; what is left goes to varargs and kwargs, or is too much.
void Evaluator::BindParameters(const chat::Macro& macro, const Arguments& arguments, Frame* frame) {
  const uint32_t* at = program_.operands(macro.node);  // name, slots, caller, kwargs, varargs, loads, body, parameters
  const uint32_t *parameters = at + 7, *end = at + program_.count(macro.node);
  size_t used = 0, named_used = 0, count = static_cast<size_t>(end - parameters) / 3;
  std::string prefix = "macro '" + std::string(macro.name) + "' ";
  bool explicit_caller = false;
  for (const uint32_t* one = parameters; one != end; one += 3) {
    std::string_view name = program_.string(one[1]);
    explicit_caller = explicit_caller || name == "caller";
    const Value* named = used < arguments.positional.size() ? nullptr : arguments.Named(name);
    if (used < arguments.positional.size()) {
      Slot(frame, 0, one[0]) = arguments.positional[used++];
    } else if (named) {
      Slot(frame, 0, one[0]) = *named;
      ++named_used;
    }
  }
  const Value* caller = arguments.Named("caller");
  if (at[2] && !explicit_caller) {
    bool given = caller && !caller->is(Kind::kNone);
    Slot(frame, 0, at[2] - 1) = given ? *caller : heap_->UndefinedBecause("No caller defined");
    named_used += caller != nullptr;
  }
  if (at[3]) {
    Dict* rest = heap_->New<Dict>();
    for (const auto& [name, value] : arguments.named) {
      bool taken = at[2] && !explicit_caller && name == "caller";
      size_t index = 0;
      for (const uint32_t* one = parameters; one != end; one += 3, ++index) {
        taken = taken || (index >= arguments.positional.size() && program_.string(one[1]) == name);
      }
      if (!taken) rest->Set(heap_, heap_->String(name), value);
    }
    Slot(frame, 0, at[3] - 1) = heap_->Object(rest);
  } else if (named_used < arguments.named.size()) {
    Fail("TypeError", prefix + "takes no keyword argument that is left");
  }
  if (at[4]) {
    auto first = arguments.positional.begin() + static_cast<std::ptrdiff_t>(used);
    std::vector<Value> rest(first, arguments.positional.end());
    Slot(frame, 0, at[4] - 1) = heap_->Copied(Kind::kTuple, rest);
  } else if (arguments.positional.size() > count) {
    Fail("TypeError", prefix + "takes not more than " + std::to_string(count) + " argument(s)");
  }
}

Value Evaluator::CallMacro(const chat::Macro& macro, const Arguments& arguments) {
  if (++calls_ > Limits::kCalls) Stop("calls nested deeper than " + std::to_string(Limits::kCalls));
  const uint32_t* at = program_.operands(macro.node);
  Frame* frame = NewFrame(at[1], macro.frame);
  BindParameters(macro, arguments, frame);
  if (at[5]) Exec(at[5] - 1, frame);
  for (uint32_t i = 7; i < program_.count(macro.node); i += 3) {
    if (!Slot(frame, 0, at[i]).is(Kind::kMissing)) continue;
    std::string_view name = program_.string(at[i + 1]);
    Value value = at[i + 2] ? Eval(at[i + 2] - 1, frame)
                            : heap_->UndefinedBecause("parameter '" + std::string(name) + "' was not provided");
    Slot(frame, 0, at[i]) = value;
  }
  Value text = Capture(at[6], frame);
  --calls_;
  return text;
}

Value Evaluator::MakeDict(const Arguments& arguments, Kind kind) {
  Dict* dict = heap_->New<Dict>();
  if (arguments.positional.size() > 1) Fail("TypeError", "dict expected at most 1 argument");
  if (!arguments.positional.empty()) {
    Value from = arguments.positional[0];
    if (from.is(Kind::kUndefined)) FailUndefined(from);
    if (from.is(Kind::kDict)) from = heap_->ViewOf(from, DictView::kItems);
    for (const Value& pair : Iterate(heap_, from)) {
      Span items = Iterate(heap_, pair);
      if (items.size != 2) Fail("ValueError", "dictionary update sequence element has a length that is not 2");
      dict->Set(heap_, items[0], items[1]);
    }
  }
  for (const auto& [name, value] : arguments.named) dict->Set(heap_, heap_->String(name), value);
  return heap_->Object(dict, kind);
}

Value Evaluator::Range(const std::vector<Value>& bounds) {
  if (bounds.empty() || bounds.size() > 3) Fail("TypeError", "range expected 1 to 3 arguments");
  int64_t numbers[3] = {0, 0, 1};
  for (size_t i = 0; i < bounds.size(); ++i) {
    numbers[bounds.size() == 1 ? 1 : i] = ToIndex(bounds[i]);
    if (std::max(numbers[i], -numbers[i]) > kMaxBound) Stop("a range of integers of more than 60 bits");
  }
  if (numbers[2] == 0) Fail("ValueError", "range() arg 3 must not be zero");
  Value range = RangeOf(heap_, numbers[0], numbers[1], numbers[2]);
  if (range.range->size > kMaxRange) {
    Fail("OverflowError", "Range too big. The sandbox blocks ranges larger than MAX_RANGE (100000).");
  }
  return range;
}

Value Evaluator::CallFunction(Function function, const Arguments& arguments) {
  if (function == kDict) return MakeDict(arguments, Kind::kDict);
  if (function == kNamespace) return MakeDict(arguments, Kind::kNamespace);
  if (function == kRange && arguments.named.empty()) return Range(arguments.positional);
  std::string_view name = function == kRaise ? "message" : "form";
  const Value* given = !arguments.positional.empty() ? &arguments.positional[0] : arguments.Named(name);
  bool other = arguments.positional.size() + arguments.named.size() > (given ? 1 : 0);
  if (other || function == kRange || (!given && function == kStrftime)) {
    Fail("TypeError", "a function with other arguments than it takes");
  }
  if (function == kRaise) Refuse(given ? ToString(heap_, *given).text() : "");
  if (!given->is(Kind::kString)) Fail("TypeError", "strftime() argument 1 must be str");
  return heap_->String(FormatTime(given->text(), now_));
}

Value Evaluator::CallLoop(Loop* loop, const Arguments& arguments) {
  uint32_t node = loop->frame ? loop->frame->recursive : 0;
  if (node == 0) Fail("TypeError", "The loop must have the 'recursive' marker to be called recursively.");
  if (arguments.positional.size() != 1 || !arguments.named.empty()) {
    Fail("TypeError", "a loop is called with its items");
  }
  return RunRecursive(node - 1, loop->frame->outer, arguments.positional[0], loop->frame->depth + 1);
}

Value Evaluator::CallLoopMethod(Loop* loop, std::string_view name, const Arguments& arguments) {
  const std::vector<Value>& values = arguments.positional;
  if (!arguments.named.empty()) Fail("TypeError", "a loop's method takes no named arguments");
  if (name == "cycle") {
    if (values.empty()) Fail("TypeError", "no items for cycling given");
    return values[static_cast<size_t>(loop->index0) % values.size()];
  }
  Value tuple = heap_->Copied(Kind::kTuple, values);
  bool changed = !Equal(heap_, loop->changed, tuple);
  if (changed) loop->changed = tuple;
  return Bool(changed);
}

}  // namespace mlcpipe::chat
