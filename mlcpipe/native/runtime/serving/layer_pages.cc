#include "serving/layer_pages.h"

namespace mlcpipe::serving {
namespace {

// Whether some layers slide, and others do not.
bool IsMixed(const ModelInfo& model) {
  return !model.sliding_layers.empty() && static_cast<int64_t>(model.sliding_layers.size()) < model.num_layers;
}

}  // namespace

std::vector<PageGroup> PageGroups(const ModelInfo& model, int64_t context_length, int64_t kv_tokens) {
  PageGroup slide{PagesOf(kv_tokens), model.sliding_layers.empty() ? 0 : model.sliding_window.value_or(0)};
  if (!IsMixed(model)) return {slide};
  const int64_t sequences = (kv_tokens + context_length - 1) / context_length;
  const int64_t most = slide.Most(context_length, model.prefill_chunk) + PagesOf(slide.window);
  slide.pages = std::min(slide.pages, sequences * most);
  return {{PagesOf(kv_tokens), 0}, slide};
}

size_t GroupOf(const ModelInfo& model, int64_t layer) { return IsMixed(model) && model.sliding_layers.count(layer); }

std::vector<int64_t> LayerPages(const ModelInfo& model, int64_t context_length, int64_t kv_tokens) {
  const std::vector<PageGroup> groups = PageGroups(model, context_length, kv_tokens);
  std::vector<int64_t> pages;
  for (int64_t layer = 0; layer < model.num_layers; ++layer) pages.push_back(groups[GroupOf(model, layer)].pages);
  return pages;
}

}  // namespace mlcpipe::serving
