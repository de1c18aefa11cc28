// Which layers share page ids, and how many pages each has (mlcpipe/runtime/serving/executor.py).
#ifndef MLCPIPE_RUNTIME_SERVING_LAYER_PAGES_H_
#define MLCPIPE_RUNTIME_SERVING_LAYER_PAGES_H_

#include "bundle/manifest.h"
#include "serving/page_pool.h"

namespace mlcpipe::serving {

// The groups of layers, with pages for so many tokens; layers that slide beside others have their own. Those have what as
// many sequences of the whole context need at once, and a window more of each, for prefixes.
std::vector<PageGroup> PageGroups(const ModelInfo& model, int64_t context_length, int64_t kv_tokens);

// The group of a layer.
size_t GroupOf(const ModelInfo& model, int64_t layer);

// How many pages each layer has.
std::vector<int64_t> LayerPages(const ModelInfo& model, int64_t context_length, int64_t kv_tokens);

}  // namespace mlcpipe::serving

#endif  // MLCPIPE_RUNTIME_SERVING_LAYER_PAGES_H_
