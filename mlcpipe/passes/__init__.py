"""Passes over the IRModule, one per file; `pipeline.py` is the only place that orders them."""
