"""CUDA: the source that TVM generates, compiled by NVIDIA's libraries to machine code and PTX that a bundle carries."""
