"""Blocks used by two models or more, written with TVM's Relax front end."""
