// Code that a program or app is linked with, as mlcpipe/compiler/static_library.py writes it.
#include "3rdparty/tvm-ffi/src/ffi/extra/module_internal.h"
#include "library.h"

#if !defined(__APPLE__)  // whose linker wants a definition of weak names too: an app names its code
// Of the program's own static library, if it has one.
extern "C" const mlcpipe_symbol mlcpipe_library_symbols[] __attribute__((weak));
#endif

namespace mlcpipe {
namespace {

// The symbols that a loader of shared libraries would find, in a table.
class SymbolTable : public tvm::ffi::Library {
 public:
  explicit SymbolTable(const mlcpipe_symbol* begin) : begin_(begin), end_(begin) {
    while (end_->name) ++end_;
  }

  void* GetSymbol(const tvm::ffi::String& name) final {
    const std::string_view wanted(name.data(), name.size());
    const auto* found = std::lower_bound(begin_, end_, wanted, [](const mlcpipe_symbol& symbol, std::string_view text) {
      return std::string_view(symbol.name) < text;
    });
    return found != end_ && found->name == wanted ? found->address : nullptr;
  }

 private:
  const mlcpipe_symbol *begin_, *end_;
};

}  // namespace

const mlcpipe_symbol* ProgramCode() {
#if defined(__APPLE__)
  return nullptr;
#else
  return mlcpipe_library_symbols;
#endif
}

tvm::ffi::Module StaticModule(const mlcpipe_symbol* table) {
  return tvm::ffi::CreateLibraryModule(tvm::ffi::make_object<SymbolTable>(table));
}

}  // namespace mlcpipe
