#include "text/template_eval.h"

#include <cstring>

#include "text/value_access.h"

namespace mlcpipe::chat {

namespace {

constexpr size_t kPieceBytes = 48;  // about what Python counts for a piece of output without its text

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
    if (items.size != count) {
      Fail("ValueError", "wrong number of values to unpack (expected " + std::to_string(count) + ")");
    }
    for (uint32_t i = 0; i < count; ++i) Assign(at[i], items[i], frame);
  }
}

}  // namespace mlcpipe::chat
