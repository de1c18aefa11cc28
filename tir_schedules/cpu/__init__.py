"""Kernels for CPUs: vectors of 16 float32 lanes, which LLVM splits to the machine's vectors."""

from tir_schedules.cpu import fast_math

fast_math.install()
