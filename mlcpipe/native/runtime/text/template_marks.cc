#include "text/template_marks.h"

#include <algorithm>

namespace mlcpipe::chat {

namespace {

constexpr uint32_t kFirstStandIn = 0x1D800, kStandIns = 0x200;  // STAND_INS of template_sandbox.py

// Only of ASCII: any other name with a control token inside is marked.
bool IsIdentifier(std::string_view text) {
  auto letter = [](char c) { return c == '_' || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); };
  auto inner = [&](char c) { return letter(c) || (c >= '0' && c <= '9'); };
  return !text.empty() && letter(text[0]) && std::all_of(text.begin(), text.end(), inner);
}

void FindUsed(Heap* heap, const Value& value, std::vector<bool>* used) {
  if (value.is(Kind::kString)) {
    std::string_view text = value.text();
    for (size_t at = 0; !value.string->ascii() && at < text.size();) {
      uint32_t index = utf8::Next(text, &at) - kFirstStandIn;
      if (index < kStandIns) (*used)[index] = true;
    }
  } else if (value.is(Kind::kList) || value.is(Kind::kDict)) {
    for (const Value& part : Iterate(heap, value)) FindUsed(heap, part, used);
    uint32_t values = value.is(Kind::kDict) ? value.dict->size : 0;
    for (uint32_t i = 0; i < values; ++i) FindUsed(heap, value.dict->values[i], used);
  }
}

}  // namespace

Marks::Marks(const Program& program) : letters_(program.letters()) {
  for (uint32_t index : program.controls()) controls_.push_back(program.string(index));
  for (uint32_t index : program.words()) words_.push_back(program.string(index));
}

Value Marks::Mark(Heap* heap, const Value& value) const {
  std::vector<bool> used(kStandIns);
  FindUsed(heap, value, &used);
  uint32_t next = 0;
  for (const Letter& letter : letters_) {
    while (next < kStandIns && used[next]) ++next;
    if (next == kStandIns) {
      throw Error(Code::kUsage, "the messages have too many kinds of signs")
          .Expected(std::to_string(letters_.size) + " free ones of U+1D800 to U+1D9FF");
    }
    heap->stand_ins.emplace_back(kFirstStandIn + next++, letter.code);
  }
  return letters_.size ? Copy(heap, value) : value;
}

Value Marks::Copy(Heap* heap, const Value& value) const {
  if (value.is(Kind::kString)) return Text(heap, value);
  if (value.is(Kind::kList)) {
    std::vector<Value> items;
    for (const Value& item : value.list->span) items.push_back(Copy(heap, item));
    return heap->Copied(Kind::kList, items);
  }
  if (!value.is(Kind::kDict)) return value;
  Dict* dict = heap->New<Dict>();
  for (uint32_t i = 0; i < value.dict->size; ++i) {
    const Value &key = value.dict->keys[i], &part = value.dict->values[i];
    bool name = part.is(Kind::kString) && (key.text() == "role" || key.text() == "type");
    dict->Set(heap, Name(heap, key), name ? Name(heap, part) : Copy(heap, part));
  }
  return heap->Object(dict);
}

// Templates compare names and sort them: they change only where they have a whole control token.
Value Marks::Name(Heap* heap, const Value& text) const {
  if (IsIdentifier(text.text())) return text;
  std::vector<bool> places(text.string->bytes);
  FindControls(heap, text.text(), &places);
  return Replaced(heap, text, places);
}

Value Marks::Text(Heap* heap, const Value& value) const {
  std::string_view text = value.text();
  std::vector<bool> places(text.size());
  heap->TickBytes(text.size() * (1 + letters_.size / 8));
  for (size_t at = 0; at < text.size();) {
    size_t begin = at;
    uint32_t code = utf8::Next(text, &at);
    auto is_edge = [&](const Letter& one) { return one.edge && one.code == code; };
    places[begin] = std::any_of(letters_.begin(), letters_.end(), is_edge);
  }
  for (std::string_view word : words_) {
    size_t at = word.empty() ? std::string_view::npos : 0;
    while (at != std::string_view::npos && (at = Find(heap, text, word, at)) != std::string_view::npos) {
      std::fill_n(places.begin() + static_cast<std::ptrdiff_t>(at), word.size(), false);
      at += word.size();
    }
  }
  FindControls(heap, text, &places);
  return Replaced(heap, value, places);
}

void Marks::FindControls(Heap* heap, std::string_view text, std::vector<bool>* places) const {
  bool first[256] = {};
  for (std::string_view control : controls_) {
    if (!control.empty()) first[static_cast<unsigned char>(control[0])] = true;
  }
  for (size_t at = 0; at < text.size(); ++at) {
    if (!first[static_cast<unsigned char>(text[at])]) continue;
    heap->Tick(1 + controls_.size() / 16);
    (*places)[at] = (*places)[at] || std::any_of(controls_.begin(), controls_.end(), [&](std::string_view control) {
      return !control.empty() && text.compare(at, control.size(), control) == 0;
    });
  }
}

Value Marks::Replaced(Heap* heap, const Value& value, const std::vector<bool>& places) const {
  if (std::find(places.begin(), places.end(), true) == places.end()) return value;
  std::string_view text = value.text();
  std::string made;
  for (size_t at = 0; at < text.size();) {
    size_t begin = at;
    uint32_t code = utf8::Next(text, &at);
    for (auto [stand_in, meant] : heap->stand_ins) {
      if (places[begin] && meant == code) {
        code = stand_in;
        break;
      }
    }
    utf8::Append(&made, code);
  }
  return heap->String(made);
}

std::vector<Part> Marks::Parts(const Heap& heap, std::string_view text) {
  std::vector<Part> parts;
  for (size_t at = 0; at < text.size();) {
    uint32_t code = utf8::Next(text, &at);
    auto stands = [&](const auto& one) { return one.first == code; };
    auto found = std::find_if(heap.stand_ins.begin(), heap.stand_ins.end(), stands);
    bool is_content = found != heap.stand_ins.end();
    if (parts.empty() || parts.back().is_content != is_content) parts.push_back({"", is_content});
    utf8::Append(&parts.back().text, is_content ? found->second : code);
  }
  return parts;
}

}  // namespace mlcpipe::chat
