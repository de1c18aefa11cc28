"""Passes one by one on small modules, and the whole pipeline on small models."""
