"""Tied embeddings, which are the model's head too: reconciles config.json with the stored tensors."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from mlcpipe.checkpoint.checkpoint import Checkpoint
from mlcpipe.checkpoint.family_names import names_of
from mlcpipe.checkpoint.matrix import Matrix
from mlcpipe.checkpoint.safetensors_reader import TensorInfo, read_bytes

_FIELD = "tie_word_embeddings"
_CHUNK_BYTES = 4 << 20


def settled(checkpoint: Checkpoint) -> Checkpoint:
    """The same checkpoint, tied only if the stored tensors allow it (transformers' `tie_weights`).

    Unless config.json unties them, a head that differs from the embedding is separate, and a head without an embedding
    is the embedding too: a model of a family that does not tie by default then lacks a head.
    """
    tensors, names = dict(checkpoint.tensors), names_of(checkpoint.config)
    embeddings, head_name = names.candidates("model.embed_tokens.weight"), names.published("lm_head.weight")
    embedding, head = next(filter(None, map(tensors.get, embeddings)), None), tensors.get(head_name)
    if head is None or checkpoint.config.get(_FIELD) is False:
        return checkpoint
    if embedding is not None and not _same(embedding, head):
        return replace(checkpoint, config={**checkpoint.config, _FIELD: False})
    # Only for whole models: draft heads also have a head without an embedding.
    if embedding is not None or names.candidates("model.norm.weight")[0] not in tensors:
        return checkpoint
    tensors[embeddings[0]] = replace(tensors.pop(head_name), name=embeddings[0])
    return replace(checkpoint, tensors=MappingProxyType(dict(sorted(tensors.items()))))


def _same(embedding: TensorInfo, head: TensorInfo) -> bool:
    """Whether both are stored with equal bytes, read up to the first difference; False for codes."""
    if isinstance(embedding, Matrix) or isinstance(head, Matrix):
        return False
    if (embedding.shape, embedding.dtype) != (head.shape, head.dtype):
        return False
    return all(_part(embedding, begin) == _part(head, begin) for begin in range(0, embedding.nbytes, _CHUNK_BYTES))


def _part(tensor: TensorInfo, begin: int) -> memoryview:
    nbytes = min(_CHUNK_BYTES, tensor.nbytes - begin)
    return read_bytes(replace(tensor, offset=tensor.offset + begin, nbytes=nbytes))
