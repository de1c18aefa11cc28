"""WebAssembly libraries for browsers: TVM's runtime, kernels in WGSL, emscripten's linker."""
