// The emulated GPU for TVM's runtime in Python. "emulated_metal.compile" is a function of the tests.
#include "gpu.cc"

namespace mlcpipe::metal {

std::string CompileKernels(const MetalModule::Sources& sources) {
  return Text(ffi::Function::GetGlobalRequired("emulated_metal.compile")(sources).cast<ffi::String>());
}

namespace {

// What TVM's code generator calls, where there is a runtime.
ffi::Module Create(ffi::Map<ffi::String, ffi::Bytes> sources, const ffi::String&, MetalModule::Functions functions,
                   ffi::Map<ffi::String, ffi::String>) {
  MetalModule::Sources texts;
  for (auto [name, source] : sources) texts.Set(name, ffi::String(source.data(), source.size()));
  Remember(texts);
  return ffi::Module(ffi::make_object<MetalModule>(texts, functions));
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  Register();
  tvm::ffi::reflection::GlobalDef()
      .def("ffi.Module.create.metal", Create)
      .def("emulated_metal.fail", [](ffi::String words) { failure = Text(words); });
}

}  // namespace mlcpipe::metal
