#include "cache_file.h"

#include <sys/stat.h>

#include <fstream>

#include "atomic_file.h"
#include "bundle/files.h"
#include "error.h"

namespace mlcpipe {

CacheFile::CacheFile(const std::string& folder, const std::string& name, const std::string& key)
    : folder_(folder), path_(folder.empty() ? "" : folder + "/" + name + "-" + Sha256(key).substr(0, 24)) {}

std::optional<std::string> CacheFile::Read() const {
  if (path_.empty()) return std::nullopt;
  std::ifstream file(path_, std::ios::binary);
  if (!file) return std::nullopt;
  std::string content(4096, '\0');
  file.read(content.data(), static_cast<std::streamsize>(content.size()));
  content.resize(static_cast<size_t>(file.gcount()));
  return content;
}

void CacheFile::Write(std::string_view content) const {
  if (path_.empty()) return;
  for (size_t at = 1; at <= folder_.size(); ++at) {
    if (at == folder_.size() || folder_[at] == '/') mkdir(folder_.substr(0, at).c_str(), 0700);
  }
  try {
    AtomicFile file(path_, content.size());
    file.Write(content.data(), content.size());
    file.Commit();
  } catch (const Error&) {
    return;
  }
}

}  // namespace mlcpipe
