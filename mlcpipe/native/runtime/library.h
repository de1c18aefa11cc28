// The compiled library of a bundle: the code of one variant, loaded.
#ifndef MLCPIPE_RUNTIME_LIBRARY_H_
#define MLCPIPE_RUNTIME_LIBRARY_H_

#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>

#include <string>

#include "bundle/manifest.h"
#include "device.h"
#include "mlcpipe.h"

namespace mlcpipe {

// The variant to run: `wanted`, or where that is empty the first that this machine can run. Throws kTarget where none
// can, kUsage where `wanted` is none of them or cannot run.
const VariantInfo& ChooseVariant(const Manifest& manifest, const std::string& wanted);

// The table of the program's own static library, or null.
const mlcpipe_symbol* ProgramCode();

// The code of a static library.
tvm::ffi::Module StaticModule(const mlcpipe_symbol* table);

class Library {
 public:
  // The code of a static library if `code` is not null, else that of the bundle. Throws kBundle for a library that is
  // not there or does not load, lacks the variant or contradicts the manifest.
  Library(const Manifest& manifest, const std::string& variant, const mlcpipe_symbol* code, const Device& device);

  // A function of the virtual machine, or a kernel. Throws kBundle where there is none.
  tvm::ffi::Function Get(const std::string& name) const;

  // All of its code.
  const tvm::ffi::Module& module() const { return module_; }

 private:
  std::string path_, variant_;
  tvm::ffi::Module module_, executable_, machine_;
};

// The error for one of TVM, which `what` failed with: kResource where memory is used up, else `code`.
Error FromTvm(const tvm::ffi::Error& error, Code code, std::string what);

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_LIBRARY_H_
