"""Kernels against numpy in float64: `cases` are the lists, `bench.kernels` measures that of CPUs."""
