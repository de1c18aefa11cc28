"""Makes checkpoints smaller: one file in `methods/` for each way, `prune.py` is the story.

It pays where a model is too large or too slow even in 4 bits, with a text to distill on (docs/pruning.md).
"""
