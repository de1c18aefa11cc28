"""`mlcpipe tune`: measured choices for kernels, kept as records that `compile` uses."""
