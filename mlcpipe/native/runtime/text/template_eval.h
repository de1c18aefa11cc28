// Runs the program of a chat template: what jinja2's compiled Python would do.
#ifndef MLCPIPE_RUNTIME_TEXT_TEMPLATE_EVAL_H_
#define MLCPIPE_RUNTIME_TEXT_TEMPLATE_EVAL_H_

#include <ctime>
#include <string>

#include "text/template_objects.h"
#include "text/template_program.h"
#include "text/value_format.h"

namespace mlcpipe::chat {

class Evaluator {
 public:
  // `variables` are those of the template; `now` is the clock of strftime_now.
  Evaluator(const Program& program, Heap* heap, const Dict& variables, const std::tm& now)
      : program_(program), heap_(heap), variables_(variables), now_(now), strings_(program.strings()) {}

  std::string Render();

 private:
  enum class Flow { kNext, kBreak, kContinue };
  enum Function : int64_t { kRange, kDict, kNamespace, kRaise, kStrftime };

  const Program& program_;
  Heap* heap_;
  const Dict& variables_;
  const std::tm& now_;
  std::string out_;  // of the template, or of the innermost capture
  std::vector<const Str*> strings_;  // of the program, those that were used
  const char* stack_ = nullptr;
  uint32_t calls_ = 0;

  Value Eval(uint32_t node, Frame* frame);
  Value EvalOptional(uint32_t node, Frame* frame) { return node ? Eval(node - 1, frame) : None(); }
  Value String(uint32_t index);
  Value EvalConstant(uint32_t node);
  Value EvalContainer(uint32_t node, Frame* frame);
  Value EvalCompare(uint32_t node, Frame* frame);
  Value EvalConcat(uint32_t node, Frame* frame);
  Value EvalFilter(uint32_t node, Frame* frame);
  Value EvalMap(uint32_t node, Frame* frame);
  Value EvalSelect(uint32_t node, Frame* frame);
  Value EvalOperator(uint32_t node, Frame* frame);
  Value MakeMacro(uint32_t node, Frame* frame);
  Value EvalAttribute(uint32_t node, Frame* frame);
  Value Load(uint32_t node, Frame* frame);
  std::vector<Value> Bound(uint32_t arguments, Frame* frame);
  Arguments EvalArguments(uint32_t node, Frame* frame);

  Flow Exec(uint32_t node, Frame* frame);
  Flow ExecBlock(uint32_t node, Frame* frame);
  Flow ExecFor(uint32_t node, Frame* frame);
  void ExecVariable(uint32_t node, Frame* frame);
  void Assign(uint32_t target, const Value& value, Frame* frame);
  void Put(std::string_view text);
  Value Capture(uint32_t body, Frame* frame);
  Value Resolve(const Value& name);
  Value& Slot(Frame* frame, uint32_t hops, uint32_t slot);
  Frame* NewFrame(uint32_t slots, Frame* outer);
  void CheckStack();

  // template_calls.cc
  Value Call(const Value& callee, const Arguments& arguments);
  Value CallMacro(const Macro& macro, const Arguments& arguments);
  void BindParameters(const Macro& macro, const Arguments& arguments, Frame* frame);
  Value CallFunction(Function function, const Arguments& arguments);
  Value CallLoop(Loop* loop, const Arguments& arguments);
  Value CallLoopMethod(Loop* loop, std::string_view name, const Arguments& arguments);
  Value RunRecursive(uint32_t node, Frame* outer, const Value& items, uint32_t depth);
  Value MakeDict(const Arguments& arguments, Kind kind);
  Value Range(const std::vector<Value>& bounds);

  // template_loops.cc
  bool Next(Iteration* iteration, Value* item);
  bool Advance(Loop* loop);
  void Peek(Loop* loop);
  int64_t LengthOfLoop(Loop* loop);
  Value LoopAttribute(const Value& value, const Value& key);
};

// As Python's datetime.strftime in the C locale, for the directives that template_program.py lets through.
std::string FormatTime(std::string_view format, const std::tm& now);

}  // namespace mlcpipe::chat

#endif  // MLCPIPE_RUNTIME_TEXT_TEMPLATE_EVAL_H_
