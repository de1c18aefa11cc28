"""Parity of every model family with transformers."""
