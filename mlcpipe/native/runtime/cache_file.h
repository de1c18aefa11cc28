// Facts about this machine for later processes: files that may be lost at any time.
#ifndef MLCPIPE_RUNTIME_CACHE_FILE_H_
#define MLCPIPE_RUNTIME_CACHE_FILE_H_

#include <optional>
#include <string>
#include <string_view>

namespace mlcpipe {

class CacheFile {
 public:
  // In a folder, which is made where it is missing, "" for none; `key` is all that the content depends on.
  CacheFile(const std::string& folder, const std::string& name, const std::string& key);

  // At most 4 kB; nothing where there is none.
  std::optional<std::string> Read() const;
  // Does nothing where the folder cannot be written: what was learned is learned again.
  void Write(std::string_view content) const;

 private:
  std::string folder_, path_;
};

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_CACHE_FILE_H_
