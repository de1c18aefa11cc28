"""Kernels for GPUs, within the limits of a target: invocations of a workgroup, shared memory, buffers of a kernel.

attention/       decode, prefill and the pages of the KV cache
matmul/          products with packed weights: dense, gated, experts, embeddings
sampling/        from logits to a token
norm.py          RMS norm, with or without the residual addition
route.py         the router of a mixture of experts
elementwise.py   everything that is not tagged
spaces.py        what `mlcpipe tune` may choose for each rule
kernel.py        vocabulary of these kernels: workgroups, shared memory, barriers, reductions
device_calls.py  subgroups, matrix units and other calls that TensorIR has no operator for
trigonometry.py  sine and cosine for large angles, installed into TVM here
"""

from tir_schedules.gpu import trigonometry

trigonometry.install()
