// Loops: jinja2's LoopContext, and what runs them.
#include "text/template_eval.h"
#include "text/value_access.h"

namespace mlcpipe::chat {

bool Evaluator::Next(Iteration* iteration, Value* item) {
  const chat::Range* range = iteration->range;
  while (iteration->next < (range ? range->size : iteration->items.size)) {
    heap_->Tick();
    size_t index = iteration->next++;
    *item = range ? Int(range->start + static_cast<int64_t>(index) * range->step) : iteration->items[index];
    if (iteration->test == 0) return true;
    const uint32_t* at = program_.operands(iteration->test - 1);  // slots, loads, target, condition
    Assign(at[2], *item, iteration->frame);
    if (program_.op(at[2]) == Op::kStoreTuple && item->is(Kind::kList)) {
      *item = heap_->Sequence(Kind::kTuple, item->list->span.items, item->list->span.size);
    }
    if (Truth(Eval(at[3], iteration->frame))) return true;
  }
  *item = Value();
  return false;
}

void Evaluator::Peek(Loop* loop) {
  if (loop->has_after) return;
  Next(loop->iteration, &loop->after);
  loop->has_after = true;
}

bool Evaluator::Advance(Loop* loop) {
  Value item;
  if (loop->has_after && !loop->after.is(Kind::kMissing)) {
    item = loop->after;
    loop->has_after = false;
  } else if (!Next(loop->iteration, &item)) {
    return false;
  }
  ++loop->index0;
  loop->before = loop->current;
  loop->current = item;
  return true;
}

// All that is left is then looked at.
int64_t Evaluator::LengthOfLoop(Loop* loop) {
  if (loop->length >= 0) return loop->length;
  std::vector<Value> rest;
  for (Value item; Next(loop->iteration, &item);) rest.push_back(item);
  bool ahead = loop->has_after && !loop->after.is(Kind::kMissing);
  Value list = heap_->Copied(Kind::kList, rest);
  *loop->iteration = {list.list->span, nullptr, 0, 0, nullptr};
  loop->length = static_cast<int64_t>(rest.size()) + loop->index0 + 1 + ahead;
  return loop->length;
}

Value Evaluator::LoopAttribute(const Value& value, const Value& key) {
  Loop* loop = value.loop;
  std::string_view name = key.text();
  if (name == "index") return Int(loop->index0 + 1);
  if (name == "index0") return Int(loop->index0);
  if (name == "first") return Bool(loop->index0 == 0);
  if (name == "length") return Int(LengthOfLoop(loop));
  if (name == "revindex") return Int(LengthOfLoop(loop) - loop->index0);
  if (name == "revindex0") return Int(LengthOfLoop(loop) - loop->index0 - 1);
  if (name == "depth") return Int(loop->frame ? int64_t{loop->frame->depth} + 1 : 1);
  if (name == "depth0") return Int(loop->frame ? loop->frame->depth : 0);
  if (name == "last" || name == "nextitem") {
    Peek(loop);
    bool last = loop->after.is(Kind::kMissing);
    if (name == "last") return Bool(last);
    return last ? heap_->UndefinedBecause("there is no next item") : loop->after;
  }
  if (name == "previtem" && loop->index0 == 0) return heap_->UndefinedBecause("there is no previous item");
  if (name == "previtem") return loop->before;
  if (name != "cycle" && name != "changed") return heap_->Undefined(key, Kind::kLoop);
  Method* method = heap_->New<Method>();
  *method = {value, key.string};
  Value made;
  made.kind = Kind::kMethod;
  made.method = method;
  return made;
}

Evaluator::Flow Evaluator::ExecFor(uint32_t node, Frame* frame) {
  const uint32_t* at = program_.operands(node);  // target, items, slot of `loop`, condition, body, else
  Value items = at[1] ? Eval(at[1] - 1, frame) : frame->items;
  auto* iteration = heap_->New<Iteration>();
  if (items.is(Kind::kLoop)) Stop("a loop over a loop");
  if (items.is(Kind::kRange)) iteration->range = items.range;
  if (!items.is(Kind::kRange)) iteration->items = Iterate(heap_, items);
  iteration->test = at[3];
  if (at[3]) {
    const uint32_t* test = program_.operands(at[3] - 1);
    iteration->frame = NewFrame(test[0], frame);
    if (test[1]) Exec(test[1] - 1, iteration->frame);
  }
  Loop* loop = heap_->New<Loop>();
  loop->iteration = iteration;
  loop->frame = at[1] ? nullptr : frame;
  Value context;
  context.kind = Kind::kLoop;
  context.loop = loop;
  bool ended = false;  // a round, without `continue`
  while (Advance(loop)) {
    if (at[2]) Slot(frame, 0, at[2] - 1) = context;
    Assign(at[0], loop->current, frame);
    Flow flow = Exec(at[4], frame);
    if (flow == Flow::kBreak) break;
    ended = ended || flow == Flow::kNext;
  }
  return at[5] && !ended ? Exec(at[5] - 1, frame) : Flow::kNext;
}

Value Evaluator::RunRecursive(uint32_t node, Frame* outer, const Value& items, uint32_t depth) {
  if (++calls_ > Limits::kCalls) Stop("calls nested deeper than " + std::to_string(Limits::kCalls));
  const uint32_t* at = program_.operands(node);
  Frame* frame = NewFrame(at[0], outer);
  frame->items = items;
  frame->recursive = node + 1;
  frame->depth = depth;
  Value text = Capture(at[1], frame);
  --calls_;
  return text;
}

}  // namespace mlcpipe::chat
