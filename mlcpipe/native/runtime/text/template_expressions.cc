// Expressions that are made of others.
#include "text/filters.h"
#include "text/template_eval.h"
#include "text/value_access.h"

namespace mlcpipe::chat {

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

Value Evaluator::EvalOperator(uint32_t node, Frame* frame) {
  const uint32_t* at = program_.operands(node);
  Op op = program_.op(node);
  if (op == Op::kBinary) {
    Value left = Eval(at[1], frame);
    return Apply(heap_, static_cast<Operator>(at[0]), left, Eval(at[2], frame));
  }
  Value value = Eval(at[0], frame);
  if (op == Op::kNot) return Bool(!Truth(value));
  return op == Op::kNegative ? Negate(value) : Negate(Negate(value));
}

Value Evaluator::MakeMacro(uint32_t node, Frame* frame) {
  auto* macro = heap_->New<chat::Macro>();
  *macro = {node, program_.string(program_.operands(node)[0]), frame};
  Value value;
  value.kind = Kind::kMacro;
  value.macro = macro;
  return value;
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
    case Op::kNegative:
    case Op::kPositive:
    case Op::kBinary:
      return EvalOperator(node, frame);
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
    case Op::kMacro:
      return MakeMacro(node, frame);
    default:
      return EvalConstant(node);
  }
}

}  // namespace mlcpipe::chat
