"""Stages of a model on several machines. Nothing here knows how calls travel: `mlcpipe/server/ray_stages.py` does."""
