"""Plants outlier channels into a llama checkpoint without a change of its function, as large models have them.

    python -m bench.outliers CHECKPOINT FOLDER

One channel in 64 of each norm before a projection is 32 times as large, and the columns of the matrices that read it are
32 times smaller. Both are powers of two, so that a float32 computation gives the same numbers; groups of weights and of
activations that are rounded on one scale lose. A good method wins that back.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from bench.program import command_line, run_program
from mlcpipe.checkpoint import open_checkpoint
from mlcpipe.support.atomic import atomic_directory

FACTOR, EVERY = 32, 64
_READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
_INNER = {"mlp.up_proj": ("mlp.down_proj",)}


def plant_outliers(
    checkpoint: Path, folder: Path, *, seed: int = 0, factor: int = FACTOR, channels: int | None = None
) -> Path:
    """Write the checkpoint in float32 to `folder`, with outliers; which channels have them depends on the seed.

    `channels` of each norm, and of what the MLP's last matrix reads; None is one in 64 of the norms alone.
    """
    source, random = open_checkpoint(checkpoint), np.random.default_rng(seed)
    tensors = {name: source.read(name) for name in source.tensors}
    for layer in range(source.config["num_hidden_layers"]):
        for norm, readers in (_READERS if channels is None else _READERS | _INNER).items():
            stem = f"model.layers.{layer}"
            weight = tensors[f"{stem}.{norm}.weight"]
            count = max(1, len(weight) // EVERY) if channels is None else channels
            chosen = random.choice(len(weight), count, replace=False)
            weight[chosen] *= factor
            for reader in readers:
                tensors[f"{stem}.{reader}.weight"][:, chosen] /= factor
    with atomic_directory(folder) as made:
        for path in checkpoint.iterdir():
            if path.suffix == ".json" and "index" not in path.name:
                shutil.copyfile(path, made / path.name)
        save_file(tensors, made / "model.safetensors", {"format": "pt"})
    return folder


def main() -> None:
    """Parse the command line and write one folder."""
    parser = command_line(__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    plant_outliers(options.checkpoint, options.folder)


if __name__ == "__main__":
    run_program(main)
