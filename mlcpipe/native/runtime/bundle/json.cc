#include "json.h"

namespace mlcpipe {
namespace {

namespace json = tvm::ffi::json;
using tvm::ffi::Any;
using tvm::ffi::String;
using tvm::ffi::TypeIndex;

constexpr int kMaxDepth = 32;
constexpr size_t kMaxValues = 1'000'000, kMaxText = 20'000;

// The parser recurses, and takes some 100 bytes for a value: both are counted before it sees the text. Every value
// follows one of the four characters that are counted.
void CheckSize(std::string_view text, const std::string& where) {
  int depth = 0;
  size_t values = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      in_string = c != '"';
      continue;
    }
    in_string = c == '"';
    if (c == '{' || c == '[') ++depth;
    if (c == '}' || c == ']') --depth;
    values += c == '{' || c == '[' || c == ':' || c == ',';
    if (depth > kMaxDepth || values > kMaxValues) {
      throw Error(Code::kBundle, depth > kMaxDepth ? "JSON nested too deeply" : "too many values in JSON").Where(where);
    }
  }
}

bool Equal(const Any& a, const Any& b) {
  if (a.type_index() != b.type_index()) {
    // TVM has short strings in the value itself, long ones beside it.
    auto one = a.try_cast<String>(), other = b.try_cast<String>();
    return one && other && *one == *other;
  }
  if (auto list = a.as<json::Array>()) {
    const auto other = b.cast<json::Array>();
    if (list->size() != other.size()) return false;
    for (size_t i = 0; i < other.size(); ++i) {
      if (!Equal((*list)[i], other[i])) return false;
    }
    return true;
  }
  if (auto fields = a.as<json::Object>()) {
    const auto other = b.cast<json::Object>();
    if (fields->size() != other.size()) return false;
    for (const auto& [key, value] : *fields) {
      auto found = other.find(key);
      if (found == other.end() || !Equal(value, (*found).second)) return false;
    }
    return true;
  }
  if (a.type_index() == TypeIndex::kTVMFFINone) return true;
  if (auto text = a.try_cast<String>()) return *text == b.cast<String>();
  if (a.type_index() == TypeIndex::kTVMFFIFloat) return a.cast<double>() == b.cast<double>();
  return a.cast<int64_t>() == b.cast<int64_t>();
}

}  // namespace

JsonObject JsonObject::Parse(std::string_view text, std::string where) {
  CheckSize(text, where);
  String message;
  const json::Value value = json::Parse(String(text.data(), text.size()), &message);
  if (!message.empty()) throw Error(Code::kBundle, "not valid JSON").Where(where).Found(message);
  auto fields = value.as<json::Object>();
  if (!fields) throw Error(Code::kBundle, "wrong type of JSON").Where(where).Expected("an object");
  return JsonObject(*fields, std::move(where));
}

Error JsonObject::Wrong(const std::string& key, std::string expected) const {
  return Error(Code::kBundle, "the field " + key).Where(where_).Expected(std::move(expected)).Next(
      "compile the model again");
}

JsonObject::Value JsonObject::Field(const char* key) const {
  auto found = fields_.find(String(key));
  if (found == fields_.end()) throw Wrong(key, "a value").Found("none");
  return (*found).second;
}

int64_t JsonObject::Int(const char* key, int64_t low, int64_t high) const {
  const Value value = Field(key);
  const bool is_int = value.type_index() == TypeIndex::kTVMFFIInt;
  if (!is_int || value.cast<int64_t>() < low || value.cast<int64_t>() > high) {
    Error error = Wrong(key, "an integer from " + std::to_string(low) + " to " + std::to_string(high));
    throw is_int ? error.Found(std::to_string(value.cast<int64_t>())) : error;
  }
  return value.cast<int64_t>();
}

std::optional<int64_t> JsonObject::OptionalInt(const char* key, int64_t low, int64_t high) const {
  if (IsNull(key)) return std::nullopt;
  return Int(key, low, high);
}

bool JsonObject::Has(const char* key) const { return fields_.count(tvm::ffi::String(key)) != 0; }

bool JsonObject::True(const char* key) const {
  const Value value = Field(key);
  if (value.type_index() != TypeIndex::kTVMFFIBool) throw Wrong(key, "true or false");
  return value.cast<bool>();
}

bool JsonObject::IsNull(const char* key) const { return Field(key).type_index() == TypeIndex::kTVMFFINone; }

std::string JsonObject::Text(const char* key) const {
  auto text = Field(key).try_cast<String>();
  if (!text || text->size() > kMaxText) throw Wrong(key, "a string of at most " + std::to_string(kMaxText) + " bytes");
  return *text;
}

JsonObject JsonObject::Object(const char* key) const {
  auto fields = Field(key).as<json::Object>();
  if (!fields) throw Wrong(key, "an object");
  return JsonObject(*fields, where_ + " " + key);
}

json::Array JsonObject::Array(const char* key) const {
  auto list = Field(key).as<json::Array>();
  if (!list) throw Wrong(key, "an array");
  return *list;
}

std::vector<JsonObject> JsonObject::Objects(const char* key) const {
  std::vector<JsonObject> objects;
  for (const Value& value : Array(key)) {
    auto fields = value.as<json::Object>();
    if (!fields) throw Wrong(key, "an array of objects");
    objects.push_back(JsonObject(*fields, where_ + " " + key + "[" + std::to_string(objects.size()) + "]"));
  }
  return objects;
}

std::vector<std::string> JsonObject::Texts(const char* key) const {
  std::vector<std::string> texts;
  for (const Value& value : Array(key)) {
    auto text = value.try_cast<String>();
    if (!text || text->size() > kMaxText) throw Wrong(key, "an array of strings");
    texts.push_back(*text);
  }
  return texts;
}

std::vector<int64_t> JsonObject::Ints(const char* key, int64_t low, int64_t high) const {
  std::vector<int64_t> numbers;
  for (const Value& value : Array(key)) {
    if (value.type_index() != TypeIndex::kTVMFFIInt || value.cast<int64_t>() < low || value.cast<int64_t>() > high) {
      throw Wrong(key, "integers from " + std::to_string(low) + " to " + std::to_string(high));
    }
    numbers.push_back(value.cast<int64_t>());
  }
  return numbers;
}

std::vector<std::string> JsonObject::Keys() const {
  std::vector<std::string> keys;
  for (const auto& [key, value] : fields_) keys.push_back(key.cast<String>());
  return keys;
}

bool JsonObject::SameField(const char* key, const JsonObject& other) const {
  return Equal(Field(key), other.Field(key));
}

}  // namespace mlcpipe
