// The emulated GPU for the native runtime.
#include <vector>

#include "gpu.cc"

namespace mlcpipe::metal {

// Writes the path of a library with kernels as a text that ends with 0.
using Compiler = void (*)(const char* const* names, const char* const* sources, size_t count, char* path, size_t room);
Compiler compiler;

std::string CompileKernels(const MetalModule::Sources& sources) {
  std::vector<std::string> texts;
  for (const auto& [name, source] : sources) texts.insert(texts.end(), {Text(name), Text(source)});
  std::vector<const char*> names, bodies;
  for (size_t i = 0; i < texts.size(); i += 2) {
    names.push_back(texts[i].c_str());
    bodies.push_back(texts[i + 1].c_str());
  }
  char path[4096] = "";
  compiler(names.data(), bodies.data(), names.size(), path, sizeof path);
  return path;
}

}  // namespace mlcpipe::metal

extern "C" {
__attribute__((visibility("default"))) void emulated_metal_compiler(mlcpipe::metal::Compiler compiler) {
  mlcpipe::metal::compiler = compiler;
}
__attribute__((visibility("default"))) void emulated_metal_fail(const char* words) { mlcpipe::metal::failure = words; }
}
