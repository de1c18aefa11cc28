"""Matmuls with packed weights on GPUs.

tiled.py         dense matmul without subgroups: gemv.py for decode rows of x, gemm.py for prefill rows
subgroup.py      matmul, dense and of experts, on subgroups of known size; GEMM by mma.py or coopmat.py where they fit
mma.py           GEMM on NVIDIA's matrix units (mma.m16n8k16)
experts_mma.py   GEMM of experts on the same units: rows sorted by expert
coopmat.py       GEMM on Vulkan's cooperative matrices and Metal's SIMD-group matrices
heads.py         the matrix of each head of latent attention: a GEMV for each row
experts.py       experts without subgroups: a GEMV for each chosen expert
take.py          rows of an embedding table
row_tile.py      tiles of few rows of x, which share one read of the weight
packed.py        the packed weight, read by one invocation for each row
packed_loads.py  the same weight, loaded by groups of 8 lanes with 16 bytes at once
output.py        stores a lane's columns, with the gate of a feed-forward block
"""
