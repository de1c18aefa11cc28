// How values lie in a Stream: see README.md.
#ifndef TVM_SUPPORT_SERIALIZER_H_
#define TVM_SUPPORT_SERIALIZER_H_

#include <tvm/ffi/tvm_ffi.h>
#include <tvm/support/io.h>

#include <map>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "TVM's format is little-endian, and so must the machine be"
#endif

namespace tvm {
namespace support {

// `enabled` says whether a type has a format; sources ask for it.
template <typename T, typename Enable = void>
struct Serializer {
  static constexpr bool enabled = false;
};

template <typename T>
struct Serializer<T, std::enable_if_t<std::is_arithmetic_v<T> || std::is_enum_v<T>>> {
  static constexpr bool enabled = true;
  static void Write(Stream* stream, const T& value) {
    stream->Write(static_cast<const void*>(&value), sizeof(T));
  }
  static bool Read(Stream* stream, T* value) {
    return stream->Read(static_cast<void*>(value), sizeof(T)) == sizeof(T);
  }
};

template <>
struct Serializer<DLDataType> {
  static constexpr bool enabled = true;
  static void Write(Stream* stream, const DLDataType& value) {
    stream->Write(value.code);
    stream->Write(value.bits);
    stream->Write(value.lanes);
  }
  static bool Read(Stream* stream, DLDataType* value) {
    return stream->Read(&value->code) && stream->Read(&value->bits) && stream->Read(&value->lanes);
  }
};

template <>
struct Serializer<DLDevice> {
  static constexpr bool enabled = true;
  static void Write(Stream* stream, const DLDevice& value) {
    stream->Write(static_cast<int32_t>(value.device_type));
    stream->Write(static_cast<int32_t>(value.device_id));
  }
  static bool Read(Stream* stream, DLDevice* value) {
    int32_t type = 0, id = 0;
    if (!stream->Read(&type) || !stream->Read(&id)) return false;
    value->device_type = static_cast<DLDeviceType>(type);
    value->device_id = id;
    return true;
  }
};

template <>
struct Serializer<std::string> {
  static constexpr bool enabled = true;
  static void Write(Stream* stream, const std::string& value) {
    stream->Write(static_cast<uint64_t>(value.size()));
    if (!value.empty()) stream->Write(static_cast<const void*>(value.data()), value.size());
  }
  static bool Read(Stream* stream, std::string* value) {
    uint64_t size = 0;
    if (!stream->Read(&size)) return false;
    value->resize(size);
    return size == 0 || stream->Read(static_cast<void*>(&(*value)[0]), size) == size;
  }
};

template <>
struct Serializer<ffi::String> {
  static constexpr bool enabled = true;
  static void Write(Stream* stream, const ffi::String& value) {
    stream->Write(std::string(value));
  }
  static bool Read(Stream* stream, ffi::String* value) {
    std::string text;
    if (!stream->Read(&text)) return false;
    *value = ffi::String(std::move(text));
    return true;
  }
};

template <typename T>
struct Serializer<std::vector<T>> {
  static constexpr bool enabled = true;
  static void Write(Stream* stream, const std::vector<T>& values) {
    stream->Write(static_cast<uint64_t>(values.size()));
    stream->WriteArray(values.data(), values.size());
  }
  static bool Read(Stream* stream, std::vector<T>* values) {
    uint64_t size = 0;
    if (!stream->Read(&size)) return false;
    values->resize(size);
    return stream->ReadArray(values->data(), size);
  }
};

template <typename T>
struct Serializer<ffi::Array<T>> {
  static constexpr bool enabled = true;
  static void Write(Stream* stream, const ffi::Array<T>& values) {
    stream->Write(static_cast<uint64_t>(values.size()));
    for (const T& value : values) stream->Write(value);
  }
  static bool Read(Stream* stream, ffi::Array<T>* values) {
    uint64_t size = 0;
    if (!stream->Read(&size)) return false;
    values->clear();
    for (uint64_t i = 0; i < size; ++i) {
      T value{};
      if (!stream->Read(&value)) return false;
      values->push_back(value);
    }
    return true;
  }
};

// Pairs of a map, in its own order. `Insert(map, key, value)` puts one back.
template <typename Map, typename Key, typename Value, typename Insert>
struct MapSerializer {
  static constexpr bool enabled = true;
  static void Write(Stream* stream, const Map& map) {
    stream->Write(static_cast<uint64_t>(map.size()));
    for (const auto& pair : map) {
      Serializer<Key>::Write(stream, pair.first);
      Serializer<Value>::Write(stream, pair.second);
    }
  }
  static bool Read(Stream* stream, Map* map) {
    uint64_t size = 0;
    if (!stream->Read(&size)) return false;
    *map = Map();
    for (uint64_t i = 0; i < size; ++i) {
      Key key;
      Value value;
      if (!Serializer<Key>::Read(stream, &key) || !Serializer<Value>::Read(stream, &value)) {
        return false;
      }
      Insert()(map, std::move(key), std::move(value));
    }
    return true;
  }
};

struct Emplace {
  template <typename Map, typename Key, typename Value>
  void operator()(Map* map, Key&& key, Value&& value) const {
    map->emplace(std::forward<Key>(key), std::forward<Value>(value));
  }
};

struct Set {
  template <typename Map, typename Key, typename Value>
  void operator()(Map* map, Key&& key, Value&& value) const {
    map->Set(std::forward<Key>(key), std::forward<Value>(value));
  }
};

template <typename K, typename V>
struct Serializer<std::map<K, V>> : MapSerializer<std::map<K, V>, K, V, Emplace> {};
template <typename K, typename V>
struct Serializer<std::unordered_map<K, V>>
    : MapSerializer<std::unordered_map<K, V>, K, V, Emplace> {};
template <typename K, typename V>
struct Serializer<ffi::Map<K, V>> : MapSerializer<ffi::Map<K, V>, K, V, Set> {};

template <typename T>
inline void Stream::Write(const T& value) {
  Serializer<T>::Write(this, value);
}

template <typename T>
inline bool Stream::Read(T* value) {
  return Serializer<T>::Read(this, value);
}

template <typename T>
inline void Stream::WriteArray(const T* values, size_t count) {
  for (size_t i = 0; i < count; ++i) Serializer<T>::Write(this, values[i]);
}

template <typename T>
inline bool Stream::ReadArray(T* values, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    if (!Serializer<T>::Read(this, values + i)) return false;
  }
  return true;
}

}  // namespace support
}  // namespace tvm

#endif  // TVM_SUPPORT_SERIALIZER_H_
