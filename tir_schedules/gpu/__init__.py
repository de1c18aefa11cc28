"""Kernels for GPUs, within the limits of a target: invocations of a workgroup, shared memory, buffers of a kernel."""

from tir_schedules.gpu import trigonometry

trigonometry.install()
