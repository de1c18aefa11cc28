#include "text/template_program.h"

#include <algorithm>

#include "text/filters.h"

namespace mlcpipe::chat {

namespace {

constexpr std::string_view kKind = "mlc_chat";
constexpr uint32_t kVersion = 1, kSections = 11;
constexpr uint32_t kMaxNodes = 1 << 20;

struct Shape {
  char what;
  std::string_view operands;
};

constexpr Shape kShapes[] = {
#define MLCPIPE_SHAPE(name, what, operands) {what, operands},
    MLCPIPE_TEMPLATE_OPS(MLCPIPE_SHAPE)
#undef MLCPIPE_SHAPE
};

// The letter of operand `index`, or 0 where there is none.
char LetterOf(std::string_view shape, size_t index) {
  size_t open = shape.find('(');
  if (open == std::string_view::npos) return index < shape.size() ? shape[index] : 0;
  if (index < open) return shape[index];
  size_t period = shape.size() - open - 2;
  return shape[open + 1 + (index - open) % period];
}

bool FitsCount(std::string_view shape, size_t count) {
  size_t open = shape.find('(');
  if (open == std::string_view::npos) return count == shape.size();
  return count >= open && (count - open) % (shape.size() - open - 2) == 0;
}

}  // namespace

Program::Program(const void* data, size_t bytes) {
  Tables tables(data, bytes, kKind, kVersion, kSections, Code::kTemplate);
  nodes_ = tables.array<Node>(0);
  operands_ = tables.array<uint32_t>(1);
  ends_ = tables.ends(2, 3);
  bytes_ = tables.array<char>(3);
  main_ = tables.array<uint32_t>(4);
  characters_ = {tables.array<ClassRange>(5), tables.array<CaseMapping>(6), ends_, bytes_};
  letters_ = tables.array<Letter>(7);
  controls_ = tables.array<uint32_t>(8);
  words_ = tables.array<uint32_t>(9);
  special_ = tables.array<SpecialToken>(10);
  if (nodes_.size > kMaxNodes) throw tables.Broken("at most " + std::to_string(kMaxNodes) + " nodes");
  if (main_.size != 2 || root() >= nodes_.size || slots() > kMaxSlots) throw tables.Broken("a first node");
  CheckStrings(tables);
  for (uint32_t id = 0; id < nodes_.size; ++id) CheckNode(tables, id);
  if (kShapes[nodes_[root()].op].what != 'b') throw tables.Broken("a statement as first node");
}

void Program::CheckStrings(const Tables& tables) const {
  if (strings() == 0 || !string(0).empty()) throw tables.Broken("an empty string first");
  for (uint32_t i = 0; i < strings(); ++i) {
    if (utf8::ValidPrefix(string(i)) != string(i).size()) throw tables.Broken("UTF-8 in string " + std::to_string(i));
  }
  auto known = [&](uint32_t index) {
    if (index >= strings()) throw tables.Broken("a string in place of " + std::to_string(index));
  };
  for (const CaseMapping& mapping : characters_.mappings) known(mapping.string);
  for (uint32_t index : controls_) known(index);
  for (uint32_t index : words_) known(index);
  for (const SpecialToken& token : special_) known(std::max(token.name, token.text));
  for (const Letter& letter : letters_) {
    if (letter.code >= 0x110000 || (letter.code >= 0xD800 && letter.code < 0xE000)) throw tables.Broken("letters");
  }
}

bool Program::FitsOperand(char letter, uint32_t operand, uint32_t id) const {
  if (letter == 'n') return true;
  if (letter == 's') return operand < strings();
  bool optional = letter < 'a';
  if (optional && operand == 0) return true;
  uint32_t child = optional ? operand - 1 : operand;
  return child < id && kShapes[nodes_[child].op].what == (letter | 32);
}

bool Program::IsBound(uint32_t arguments) const {
  const uint32_t* at = operands(arguments);
  bool plain = at[0] == 0 && at[1] == 0;
  for (uint32_t i = 2; i < count(arguments); i += 2) plain = plain && at[i] == 0;
  return plain;
}

// Whether the numbers of a node that say how much to do are small. Slots are checked where they are used.
bool Program::FitsNumbers(uint32_t id) const {
  const uint32_t* at = operands(id);
  switch (op(id)) {
    case Op::kBinary:
      return at[0] < 7;
    case Op::kCompare:
      for (uint32_t i = 1; i < count(id); i += 2) {
        if (at[i] >= 8) return false;
      }
      return true;
    case Op::kMacro:
      return at[1] <= kMaxSlots;
    case Op::kRecursive:
      return at[0] <= kMaxSlots && op(at[1]) == Op::kFor;
    case Op::kLoopTest:
      return at[0] <= kMaxSlots;
    case Op::kFilter:
    case Op::kMap:
      return IsBound(at[2]) && FindFilter(string(at[0]), Bound(at[2]));
    case Op::kTest:
      return IsBound(at[2]) && FindTest(string(at[0]), Bound(at[2]));
    case Op::kSelect:
      return at[0] < 2 && IsBound(at[4]) && (at[3] == 0 || FindTest(string(at[3]), Bound(at[4])));
    default:
      return true;
  }
}

void Program::CheckNode(const Tables& tables, uint32_t id) const {
  const Node& node = nodes_[id];
  std::string where = "node " + std::to_string(id);
  if (node.op >= static_cast<uint32_t>(Op::kCount)) throw tables.Broken("a known operation in " + where);
  if (node.first > operands_.size || node.count > operands_.size - node.first) {
    throw tables.Broken("operands of " + where);
  }
  const Shape& shape = kShapes[node.op];
  bool fits = FitsCount(shape.operands, node.count);
  for (uint32_t i = 0; fits && i < node.count; ++i) {
    fits = FitsOperand(LetterOf(shape.operands, i), operands_[node.first + i], id);
  }
  if (!fits || !FitsNumbers(id)) throw tables.Broken("operands of a kind that fits " + where);
}

}  // namespace mlcpipe::chat
