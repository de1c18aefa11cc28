// Untrusted JSON: bounded in depth and number of values, read field by field with checks.
#ifndef MLCPIPE_RUNTIME_BUNDLE_JSON_H_
#define MLCPIPE_RUNTIME_BUNDLE_JSON_H_

#include <tvm/ffi/extra/json.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "../error.h"

namespace mlcpipe {

// An object; its readers throw kBundle for a field that is missing, of another type or out of range.
class JsonObject {
 public:
  // `where` is for errors: a file, then the fields on the way. Throws kBundle for anything but an object.
  static JsonObject Parse(std::string_view text, std::string where);

  int64_t Int(const char* key, int64_t low, int64_t high) const;
  // null is no number.
  std::optional<int64_t> OptionalInt(const char* key, int64_t low, int64_t high) const;
  std::string Text(const char* key) const;
  bool Has(const char* key) const;
  bool True(const char* key) const;
  bool IsNull(const char* key) const;
  JsonObject Object(const char* key) const;
  std::vector<JsonObject> Objects(const char* key) const;
  std::vector<std::string> Texts(const char* key) const;
  std::vector<int64_t> Ints(const char* key, int64_t low, int64_t high) const;
  std::vector<std::string> Keys() const;

  // Whether two fields have equal values.
  bool SameField(const char* key, const JsonObject& other) const;

  Error Wrong(const std::string& key, std::string expected) const;

 private:
  using Value = tvm::ffi::json::Value;

  JsonObject(tvm::ffi::json::Object fields, std::string where) : fields_(std::move(fields)), where_(std::move(where)) {}

  Value Field(const char* key) const;
  tvm::ffi::json::Array Array(const char* key) const;

  tvm::ffi::json::Object fields_;
  std::string where_;
};

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_BUNDLE_JSON_H_
