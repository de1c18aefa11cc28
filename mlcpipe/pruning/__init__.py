"""Makes checkpoints smaller: one file in `methods/` for each way, `prune.py` is the story."""
