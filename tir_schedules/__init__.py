"""Kernels and schedule rules: what turns a tagged PrimFunc into fast code for one target."""
