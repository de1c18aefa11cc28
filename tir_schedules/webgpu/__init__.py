"""Kernels for WebGPU: workgroups of at most 256 invocations with 32 KiB of shared memory."""

from tir_schedules.webgpu import trigonometry

trigonometry.install()
