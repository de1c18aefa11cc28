"""Parts of the kinds of device, several of them shared: TVM's runtime, threads, drivers, CUDA graphs."""
