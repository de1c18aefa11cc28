// Filters and tests of jinja2, and transformers' tojson. Their arguments come bound: one value for each parameter.
#ifndef MLCPIPE_RUNTIME_TEXT_FILTERS_H_
#define MLCPIPE_RUNTIME_TEXT_FILTERS_H_

#include <string_view>

#include "text/value.h"

namespace mlcpipe::chat {

using FilterFunction = Value (*)(Heap* heap, const Value& value, const Value* args);
using TestFunction = bool (*)(Heap* heap, const Value& value, const Value* args);

struct Filter {
  const char* name;
  uint32_t parameters;
  FilterFunction call;
};
struct Test {
  const char* name;
  uint32_t parameters;
  TestFunction call;
};

// Null for a name that is not known, or not with so many parameters.
const Filter* FindFilter(std::string_view name, uint32_t parameters);
const Test* FindTest(std::string_view name, uint32_t parameters);

// Parts of the list above, for each file.
View<Filter> TextFilters();
View<Filter> SequenceFilters();

// The key of sorting and comparing filters: an attribute, without case unless `case_sensitive`.
Value SortKey(Heap* heap, const Value& item, const Value& attribute, const Value& default_value, bool case_sensitive);

}  // namespace mlcpipe::chat

#endif  // MLCPIPE_RUNTIME_TEXT_FILTERS_H_
