// A chat template of a bundle: messages in, the prompt's text out, as mlcpipe/runtime/text/chat_template.py.
#ifndef MLCPIPE_RUNTIME_TEXT_TEMPLATE_H_
#define MLCPIPE_RUNTIME_TEXT_TEMPLATE_H_

#include <ctime>
#include <string>
#include <utility>
#include <vector>

#include "text/template_marks.h"
#include "text/template_program.h"

namespace mlcpipe::chat {

// The input of a template. The texts must stay until it is rendered.
struct Request {
  std::string_view messages;  // JSON: a list of objects, each with a role and a content (text, null or text parts)
  std::string_view extras;    // JSON: an object with more variables (tools, documents, …), or empty
  std::vector<std::pair<std::string, std::string>> tokens;  // special tokens in addition to those of the file
  bool add_generation_prompt = true;
  std::tm now = {};  // of strftime_now
};

// Safe to share between threads.
class Template {
 public:
  // `data` is the file that template_program.py wrote: it must stay, and lie at a multiple of 8. Throws Error with
  // Code::kTemplate for a damaged one.
  Template(const void* data, size_t bytes);

  // Whether its answers are in the harmony format. Thoughts of earlier ones are left out then.
  bool harmony() const { return harmony_; }

  // Throws Error: Code::kUsage for messages of another form, Code::kTemplate where the template refuses them, fails or
  // goes over its limits.
  std::string Render(const Request& request) const;
  // The same text, of which the characters are known that messages wrote.
  std::vector<Part> RenderMarked(const Request& request) const;

 private:
  Program program_;
  Marks marks_;
  bool harmony_;

  std::string Run(Heap* heap, const Request& request, bool mark) const;
};

}  // namespace mlcpipe::chat

#endif  // MLCPIPE_RUNTIME_TEXT_TEMPLATE_H_
