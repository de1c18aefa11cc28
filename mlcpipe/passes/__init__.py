"""Passes over the IRModule, one a file; `pipeline.py` is the only place that orders them."""
