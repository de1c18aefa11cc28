"""Kernels against numpy in float64; `cases.py` is the list, `bench.py` measures it."""
