// A chat template compiled by mlcpipe/compiler/text/template_program.py, in mapped memory; all of it is checked here.
#ifndef MLCPIPE_RUNTIME_TEXT_TEMPLATE_PROGRAM_H_
#define MLCPIPE_RUNTIME_TEXT_TEMPLATE_PROGRAM_H_

#include <string_view>
#include <vector>

#include "tables.h"
#include "text/template_ops.h"
#include "text/value_characters.h"

namespace mlcpipe::chat {

enum class Op : uint32_t {
#define MLCPIPE_OP(name, what, operands) k##name,
  MLCPIPE_TEMPLATE_OPS(MLCPIPE_OP)
#undef MLCPIPE_OP
      kCount
};

struct Node {
  uint32_t op, first, count;
};

// A character that begins or ends a control token, and whether it is a sign.
struct Letter {
  uint32_t code, edge;
};

// Strings of a special token: `bos_token` and the like, and its text.
struct SpecialToken {
  uint32_t name, text;
};

class Program {
 public:
  // `data` must stay, and lie at a multiple of 8. Throws Error with Code::kTemplate.
  Program(const void* data, size_t bytes);

  Op op(uint32_t node) const { return static_cast<Op>(nodes_[node].op); }
  const uint32_t* operands(uint32_t node) const { return operands_.data + nodes_[node].first; }
  uint32_t count(uint32_t node) const { return nodes_[node].count; }
  std::string_view string(uint32_t index) const { return StringAt(ends_, bytes_, index); }
  uint32_t strings() const { return static_cast<uint32_t>(ends_.size); }
  uint32_t root() const { return main_[0]; }
  uint32_t slots() const { return main_[1]; }
  const Characters& characters() const { return characters_; }
  // The marks of the characters of messages (mlcpipe/runtime/text/contents.py).
  View<Letter> letters() const { return letters_; }
  View<uint32_t> controls() const { return controls_; }
  View<uint32_t> words() const { return words_; }
  View<SpecialToken> special() const { return special_; }

  // The number of arguments that all are positional.
  uint32_t Bound(uint32_t arguments) const { return (count(arguments) - 2) / 2; }

  static constexpr uint32_t kMaxSlots = 4096;  // of a function

 private:
  View<Node> nodes_;
  View<uint32_t> operands_, ends_, main_, controls_, words_;
  View<char> bytes_;
  View<Letter> letters_;
  View<SpecialToken> special_;
  Characters characters_;

  void CheckNode(const Tables& tables, uint32_t id) const;
  bool FitsOperand(char letter, uint32_t operand, uint32_t id) const;
  bool IsBound(uint32_t arguments) const;
  bool FitsNumbers(uint32_t id) const;
  void CheckStrings(const Tables& tables) const;
};

}  // namespace mlcpipe::chat

#endif  // MLCPIPE_RUNTIME_TEXT_TEMPLATE_PROGRAM_H_
