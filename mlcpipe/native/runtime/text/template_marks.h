// A user's text is text: tells the messages' characters from the template's own (mlcpipe/runtime/text/contents.py).
#ifndef MLCPIPE_RUNTIME_TEXT_TEMPLATE_MARKS_H_
#define MLCPIPE_RUNTIME_TEXT_TEMPLATE_MARKS_H_

#include <string>
#include <vector>

#include "text/template_program.h"
#include "text/value.h"

namespace mlcpipe::chat {

// A part of a prompt. What messages wrote of the characters that begin and end control tokens is content: a control
// token with such a character inside is text, wherever the template put it together.
struct Part {
  std::string text;
  bool is_content;
};

class Marks {
 public:
  explicit Marks(const Program& program);

  // A copy of JSON data with stand-ins, which are then those of `heap`. Throws Error with Code::kUsage where none is
  // left.
  Value Mark(Heap* heap, const Value& value) const;
  // The rendered text, with the characters in place of their stand-ins.
  static std::vector<Part> Parts(const Heap& heap, std::string_view text);

 private:
  View<Letter> letters_;
  std::vector<std::string_view> controls_, words_;

  Value Copy(Heap* heap, const Value& value) const;
  Value Name(Heap* heap, const Value& text) const;
  Value Text(Heap* heap, const Value& text) const;
  void FindControls(Heap* heap, std::string_view text, std::vector<bool>* places) const;
  Value Replaced(Heap* heap, const Value& text, const std::vector<bool>& places) const;
};

}  // namespace mlcpipe::chat

#endif  // MLCPIPE_RUNTIME_TEXT_TEMPLATE_MARKS_H_
