"""Quantized checkpoints in safetensors, one file per method (`gptq.py`), found by the name in config.json.

Each has `matrices(settings, tensors)`: the matrices that the stored tensors make up, by name, and the names of the
tensors that it used.
"""
