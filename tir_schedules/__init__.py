"""Kernels and schedule rules, which turn a tagged PrimFunc into fast code for one target."""
