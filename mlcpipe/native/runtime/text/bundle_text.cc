#include "text/bundle_text.h"

#include <ctime>

namespace mlcpipe {
namespace {

constexpr char kTokenizer[] = "tokenizer.bin", kTemplate[] = "template.bin";
constexpr uint64_t kMaxBytes = 256 << 20;

MappedFile OpenTokenizer(const Files& files) {
  if (files.Has(kTokenizer)) return files.Open(kTokenizer, kMaxBytes);
  throw Error(Code::kTokenizer, "the bundle has no tokenizer.bin")
      .Where(files.where())
      .Next("compile the model again, and see what compile says of its tokenizer");
}

std::optional<MappedFile> OpenTemplate(const Files& files) {
  if (!files.Has(kTemplate)) return std::nullopt;
  return files.Open(kTemplate, kMaxBytes);
}

chat::Request RequestOf(std::string_view messages, std::string_view variables) {
  chat::Request request;
  request.messages = messages;
  request.extras = variables;
  const std::time_t now = std::time(nullptr);
  localtime_r(&now, &request.now);
  return request;
}

}  // namespace

bool BundleText::In(const Files& files) { return files.Has(kTokenizer); }

BundleText::BundleText(const Files& files)
    : tokenizer_file_(OpenTokenizer(files)),
      template_file_(OpenTemplate(files)),
      tokenizer_(tokenizer_file_.data(), tokenizer_file_.bytes()) {
  if (template_file_) template_.emplace(template_file_->data(), template_file_->bytes());
}

const chat::Template& BundleText::RequiredTemplate() const {
  if (template_) return *template_;
  throw Error(Code::kTemplate, "the bundle has no chat template").Next("continue plain text instead");
}

std::vector<uint32_t> BundleText::EncodeChat(std::string_view messages, std::string_view variables) const {
  const auto marked = RequiredTemplate().RenderMarked(RequestOf(messages, variables));
  std::vector<ChatPart> parts;
  for (const chat::Part& part : marked) parts.push_back({part.text, part.is_content});
  return tokenizer_.EncodeChat(parts);
}

std::string BundleText::Render(std::string_view messages, std::string_view variables) const {
  return RequiredTemplate().Render(RequestOf(messages, variables));
}

std::vector<uint32_t> BundleText::Ends() const {
  std::vector<uint32_t> ends;
  const auto& flags = tokenizer_.tables().flags;
  for (size_t id = 0; id < flags.size; ++id) {
    if (flags[id] & TokenizerTables::kEnds) ends.push_back(static_cast<uint32_t>(id));
  }
  return ends;
}

}  // namespace mlcpipe
