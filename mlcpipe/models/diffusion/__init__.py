"""Families whose models write text by diffusion, one file each, named after Hugging Face's `model_type`."""
