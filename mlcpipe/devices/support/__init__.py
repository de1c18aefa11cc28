"""What several kinds of device need, and parts of one kind: TVM's runtime, threads, drivers, CUDA graphs."""
