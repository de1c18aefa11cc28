"""Makes an environment with openvino-genai, and exports checkpoints for it.

    python -m bench.build_openvino FOLDER [CHECKPOINT ...]

The environment (2 GB with torch, which the export needs) is FOLDER/openvino-VERSION; it never shares packages with
mlcpipe's. A checkpoint NAME becomes FOLDER/openvino-VERSION/models/NAME-int4 (symmetric, groups of 64, every
matrix but the embedding, which is int8) and NAME-int8 (one scale a row). Those are the exporter's usual choices.
"""

from __future__ import annotations

from pathlib import Path

from bench.environment import make_environment, run
from bench.program import command_line, run_program

VERSION = "2026.4.1.0"
_PACKAGES = (
    f"openvino-genai=={VERSION}",
    f"openvino-tokenizers=={VERSION}",
    "optimum-intel==2.2.0",
    "nncf==3.4.0",
    "transformers==5.5.4",
    "torch==2.13.0",
    "safetensors",
)
_WEIGHTS = {
    4: ["--weight-format", "int4", "--sym", "--group-size", "64", "--ratio", "1.0"],
    8: ["--weight-format", "int8"],
}


def build_openvino(folder: Path) -> Path:
    """The environment's Python, made if it is not there. Raises ResourceError if a step fails."""
    # torchvision comes along with optimum-intel, for another build of torch than the one installed if that is a CPU build;
    # transformers imports it where it is present and fails then. Text models do not need it.
    return make_environment(folder / f"openvino-{VERSION}", _PACKAGES, without=["torchvision"])


def export(python: Path, checkpoint: Path, bits: int) -> Path:
    """The folder of the exported model, made if it is not there. Raises ResourceError."""
    output = python.parent.parent / "models" / f"{checkpoint.name}-int{bits}"
    if not output.is_dir():
        partial = output.with_name(output.name + ".partial")
        task = ["--task", "text-generation-with-past"]
        command = [str(python), "-m", "optimum.commands.optimum_cli", "export", "openvino", "-m", str(checkpoint)]
        run([*command, *task, *_WEIGHTS[bits], str(partial)])
        partial.rename(output)
    return output


def bytes_per_token(model: Path) -> int:
    """Bytes of weights that a decode step reads: of a tied embedding, which these models have, all."""
    return (model / "openvino_model.bin").stat().st_size


def main() -> None:
    """Parse the command line, build, export, print the paths."""
    parser = command_line(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("checkpoint", type=Path, nargs="*")
    options = parser.parse_args()
    python = build_openvino(options.folder)
    print(python)
    for checkpoint in options.checkpoint:
        for bits in _WEIGHTS:
            print(export(python, checkpoint, bits))


if __name__ == "__main__":
    run_program(main)
