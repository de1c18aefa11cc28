#include "text/template_eval.h"

#include <cstring>

#include "text/filters.h"
#include "text/value_access.h"

namespace mlcpipe::chat {

namespace {

constexpr size_t kPieceBytes = 48;  // about what Python counts for a piece of output besides its text

int64_t Joined(uint32_t low, uint32_t high) { return static_cast<int64_t>(low | uint64_t{high} << 32); }

}  // namespace

std::string Evaluator::Render() {
  stack_ = static_cast<const char*>(__builtin_frame_address(0));
  Exec(program_.root(), NewFrame(program_.slots(), nullptr));
  return std::move(out_);
}

void Evaluator::CheckStack() {
  heap_->Tick();
  auto here = static_cast<const char*>(__builtin_frame_address(0));
  size_t used = static_cast<size_t>(here < stack_ ? stack_ - here : here - stack_);
  if (used > Limits::kStackBytes) Stop("statements or calls nested too deep");
}

Frame* Evaluator::NewFrame(uint32_t slots, Frame* outer) {
  heap_->Tick(1 + slots / 8);
  Frame* frame = heap_->New<Frame>();
  frame->slots = heap_->New<Value>(slots);
  frame->size = slots;
  frame->outer = outer;
  return frame;
}

Value& Evaluator::Slot(Frame* frame, uint32_t hops, uint32_t slot) {
  for (; hops > 0 && frame; --hops) frame = frame->outer;
  if (!frame || slot >= frame->size) {
    throw Error(Code::kTemplate, "a damaged chat template").Expected("a variable of the function that names it");
  }
  return frame->slots[slot];
}

Value Evaluator::Load(uint32_t node, Frame* frame) {
  const uint32_t* at = program_.operands(node);
  const Value& value = Slot(frame, at[0], at[1]);
  return value.is(Kind::kMissing) ? heap_->Undefined(String(at[2])) : value;
}

// A string of the program, which takes memory only once.
Value Evaluator::String(uint32_t index) {
  if (!strings_[index]) strings_[index] = heap_->String(program_.string(index)).string;
  Value value;
  value.kind = Kind::kString;
  value.string = strings_[index];
  return value;
}

Value Evaluator::EvalConstant(uint32_t node) {
  const uint32_t* at = program_.operands(node);
  switch (program_.op(node)) {
    case Op::kMissing:
      return Value();
    case Op::kNone:
      return None();
    case Op::kTrue:
      return Bool(true);
    case Op::kFalse:
      return Bool(false);
    case Op::kInt:
      return Int(Joined(at[0], at[1]));
    case Op::kFloat: {
      double number = 0;
      int64_t bits = Joined(at[0], at[1]);
      std::memcpy(&number, &bits, sizeof number);
      return Float(number);
    }
    case Op::kFail:
      Fail(program_.string(at[0]), std::string(program_.string(at[1])));
    default:
      return String(at[0]);
  }
}

Value Evaluator::EvalContainer(uint32_t node, Frame* frame) {
  const uint32_t* at = program_.operands(node);
  uint32_t count = program_.count(node);
  if (program_.op(node) == Op::kDict) {
    Dict* dict = heap_->New<Dict>();
    for (uint32_t i = 0; i < count; i += 2) {
      Value key = Eval(at[i], frame);
      dict->Set(heap_, key, Eval(at[i + 1], frame));
    }
    return heap_->Object(dict);
  }
  Value* items = heap_->New<Value>(count);
  for (uint32_t i = 0; i < count; ++i) items[i] = Eval(at[i], frame);
  return heap_->Sequence(program_.op(node) == Op::kList ? Kind::kList : Kind::kTuple, items, count);
}

Value Evaluator::EvalCompare(uint32_t node, Frame* frame) {
  const uint32_t* at = program_.operands(node);
  Value left = Eval(at[0], frame);
  for (uint32_t i = 1; i < program_.count(node); i += 2) {
    Value right = Eval(at[i + 1], frame);
    if (!Compare(heap_, static_cast<Comparison>(at[i]), left, right)) return Bool(false);
    left = right;
  }
  return Bool(true);
}

Value Evaluator::EvalConcat(uint32_t node, Frame* frame) {
  const uint32_t* at = program_.operands(node);
  std::string text;
  for (uint32_t i = 0; i < program_.count(node); ++i) {
    Value part = Eval(at[i], frame);
    text += ToString(heap_, part).text();
    heap_->FitText(text.size() / 4);
  }
  return heap_->String(text);
}

std::vector<Value> Evaluator::Bound(uint32_t arguments, Frame* frame) {
  const uint32_t* at = program_.operands(arguments);
  std::vector<Value> values;
  for (uint32_t i = 2; i < program_.count(arguments); i += 2) values.push_back(Eval(at[i + 1], frame));
  return values;
}

Value Evaluator::EvalFilter(uint32_t node, Frame* frame) {
  const uint32_t* at = program_.operands(node);
  bool filters = program_.op(node) == Op::kFilter;
  Value value = Eval(at[1], frame);
  std::vector<Value> args = Bound(at[2], frame);
  auto count = static_cast<uint32_t>(args.size());
  std::string_view name = program_.string(at[0]);
  if (filters) return FindFilter(name, count)->call(heap_, value, args.data());
  return chat::Bool(FindTest(name, count)->call(heap_, value, args.data()));
}

Value Evaluator::EvalMap(uint32_t node, Frame* frame) {
  const uint32_t* at = program_.operands(node);
  std::vector<Value> made;
  if (program_.op(node) == Op::kMapAttr) {
    Value items = Eval(at[0], frame), attribute = Eval(at[1], frame), otherwise = Eval(at[2], frame);
    if (!Truth(items)) return heap_->Copied(Kind::kList, made);
    for (const Value& item : Iterate(heap_, items)) made.push_back(Lookup(heap_, item, attribute, otherwise));
    return heap_->Copied(Kind::kList, made);
  }
  Value items = Eval(at[1], frame);
  std::vector<Value> args = Bound(at[2], frame);
  if (!Truth(items)) return heap_->Copied(Kind::kList, made);  // None too
  const Filter* filter = FindFilter(program_.string(at[0]), static_cast<uint32_t>(args.size()));
  for (const Value& item : Iterate(heap_, items)) {
    heap_->Tick();
    made.push_back(filter->call(heap_, item, args.data()));
  }
  return heap_->Copied(Kind::kList, made);
}

Value Evaluator::EvalSelect(uint32_t node, Frame* frame) {
  const uint32_t* at = program_.operands(node);
  Value items = Eval(at[1], frame), attribute = Eval(at[2], frame);
  std::vector<Value> args = Bound(at[4], frame), kept;
  if (!Truth(items)) return heap_->Copied(Kind::kList, kept);
  const Test* test = at[3] ? FindTest(program_.string(at[3]), static_cast<uint32_t>(args.size())) : nullptr;
  for (const Value& item : Iterate(heap_, items)) {
    heap_->Tick();
    Value value = Lookup(heap_, item, attribute);
    if ((test ? test->call(heap_, value, args.data()) : Truth(value)) == (at[0] == 1)) kept.push_back(item);
  }
  return heap_->Copied(Kind::kList, kept);
}

Value Evaluator::EvalAttribute(uint32_t node, Frame* frame) {
  const uint32_t* at = program_.operands(node);
  Value object = Eval(at[0], frame);
  if (program_.op(node) == Op::kSlice) {
    Value start = EvalOptional(at[1], frame), stop = EvalOptional(at[2], frame);
    return Slice(heap_, object, start, stop, EvalOptional(at[3], frame));
  }
  if (program_.op(node) == Op::kGetAttr) {
    Value name = String(at[1]);
    return object.is(Kind::kLoop) ? LoopAttribute(object, name) : GetAttr(heap_, object, name);
  }
  Value key = Eval(at[1], frame);
  bool of_loop = object.is(Kind::kLoop) && key.is(Kind::kString);
  return of_loop ? LoopAttribute(object, key) : GetItem(heap_, object, key);
}

Value Evaluator::Eval(uint32_t node, Frame* frame) {
  CheckStack();
  const uint32_t* at = program_.operands(node);
  switch (program_.op(node)) {
    case Op::kLoad:
      return Load(node, frame);
    case Op::kTuple:
    case Op::kList:
    case Op::kDict:
      return EvalContainer(node, frame);
    case Op::kCond:
      if (Truth(Eval(at[0], frame))) return Eval(at[1], frame);
      return at[2] ? Eval(at[2] - 1, frame) : heap_->UndefinedBecause(program_.string(at[3]));
    case Op::kAnd:
    case Op::kOr: {
      Value left = Eval(at[0], frame);
      return Truth(left) == (program_.op(node) == Op::kOr) ? left : Eval(at[1], frame);
    }
    case Op::kNot:
      return Bool(!Truth(Eval(at[0], frame)));
    case Op::kNegative:
      return Negate(Eval(at[0], frame));
    case Op::kPositive:
      return Negate(Negate(Eval(at[0], frame)));
    case Op::kBinary: {
      Value left = Eval(at[1], frame);
      return Apply(heap_, static_cast<Operator>(at[0]), left, Eval(at[2], frame));
    }
    case Op::kConcat:
      return EvalConcat(node, frame);
    case Op::kCompare:
      return EvalCompare(node, frame);
    case Op::kGetAttr:
    case Op::kGetItem:
    case Op::kSlice:
      return EvalAttribute(node, frame);
    case Op::kCall: {
      Value callee = Eval(at[0], frame);
      return Call(callee, EvalArguments(at[1], frame));
    }
    case Op::kFilter:
    case Op::kTest:
      return EvalFilter(node, frame);
    case Op::kMap:
    case Op::kMapAttr:
      return EvalMap(node, frame);
    case Op::kSelect:
      return EvalSelect(node, frame);
    case Op::kCapture:
      return Capture(at[0], frame);
    case Op::kMacro: {
      chat::Macro* macro = heap_->New<chat::Macro>();
      *macro = {node, program_.string(at[0]), frame};
      Value value;
      value.kind = Kind::kMacro;
      value.macro = macro;
      return value;
    }
    default:
      return EvalConstant(node);
  }
}

void Evaluator::Put(std::string_view text) {
  heap_->TickBytes(text.size());
  heap_->Take(text.size() + kPieceBytes);
  out_ += text;
}

Value Evaluator::Capture(uint32_t body, Frame* frame) {
  std::string outer;
  outer.swap(out_);
  Exec(body, frame);
  outer.swap(out_);
  return heap_->String(outer);
}

Evaluator::Flow Evaluator::ExecBlock(uint32_t node, Frame* frame) {
  const uint32_t* at = program_.operands(node);
  for (uint32_t i = 0; i < program_.count(node); ++i) {
    Flow flow = Exec(at[i], frame);
    if (flow != Flow::kNext) return flow;
  }
  return Flow::kNext;
}

void Evaluator::ExecVariable(uint32_t node, Frame* frame) {
  const uint32_t* at = program_.operands(node);
  if (program_.op(node) == Op::kResolve) {
    Slot(frame, 0, at[0]) = Resolve(String(at[1]));
  } else if (program_.op(node) == Op::kAlias) {
    Value value = Slot(frame, at[1], at[2]);
    Slot(frame, 0, at[0]) = value;
  } else {
    for (uint32_t i = 0; i < program_.count(node); ++i) Slot(frame, 0, at[i]) = Value();
  }
}

Evaluator::Flow Evaluator::Exec(uint32_t node, Frame* frame) {
  CheckStack();
  const uint32_t* at = program_.operands(node);
  switch (program_.op(node)) {
    case Op::kBlock:
      return ExecBlock(node, frame);
    case Op::kData:
      Put(program_.string(at[0]));
      return Flow::kNext;
    case Op::kOutput: {
      Value value = Eval(at[0], frame);
      Put(ToString(heap_, value).text());
      return Flow::kNext;
    }
    case Op::kSet:
      Assign(at[0], Eval(at[1], frame), frame);
      return Flow::kNext;
    case Op::kIf:
      if (Truth(Eval(at[0], frame))) return Exec(at[1], frame);
      return at[2] ? Exec(at[2] - 1, frame) : Flow::kNext;
    case Op::kFor:
      return ExecFor(node, frame);
    case Op::kRecursive: {
      Value items = Eval(at[2], frame);
      Put(RunRecursive(node, frame, items, 0).text());
      return Flow::kNext;
    }
    case Op::kBreak:
      return Flow::kBreak;
    case Op::kContinue:
      return Flow::kContinue;
    default:
      ExecVariable(node, frame);
      return Flow::kNext;
  }
}

void Evaluator::Assign(uint32_t target, const Value& value, Frame* frame) {
  CheckStack();
  const uint32_t* at = program_.operands(target);
  if (program_.op(target) == Op::kStore) {
    Slot(frame, 0, at[0]) = value;
  } else if (program_.op(target) == Op::kStoreAttr) {
    const Value& owner = Slot(frame, at[0], at[1]);
    if (!owner.is(Kind::kNamespace)) Fail("TemplateRuntimeError", "cannot assign attribute on non-namespace object");
    owner.dict->Set(heap_, String(at[2]), value);
  } else {
    Span items = Iterate(heap_, value);
    uint32_t count = program_.count(target);
    if (items.size != count) Fail("ValueError", "wrong number of values to unpack (expected " + std::to_string(count) + ")");
    for (uint32_t i = 0; i < count; ++i) Assign(at[i], items[i], frame);
  }
}

}  // namespace mlcpipe::chat
