"""`mlcpipe tune`: measure which knobs make a model's kernels faster."""
