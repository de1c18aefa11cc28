"""Makes an environment with onnxruntime-genai's exporter, and exports checkpoints for transformers.js.

    python -m bench.build_onnx FOLDER CHECKPOINT MODEL

The environment (1.4 GB with torch, which the export needs) is FOLDER/onnx-VERSION; it never shares packages with
mlcpipe's. MODEL becomes a folder as transformers.js wants it: configuration, tokenizer, onnx/model.onnx (float32)
and onnx/model_q4.onnx (matrices in 4 bits, blocks of 32).
"""

from __future__ import annotations

import shutil
from pathlib import Path

from bench.environment import make_environment, run
from bench.program import command_line, run_program
from mlcpipe.support.atomic import atomic_directory

VERSION = "0.18.0"
_PACKAGES = (
    f"onnxruntime-genai=={VERSION}",
    "onnx==1.23.2",
    "onnx-ir==1.1.0",
    "torch==2.13.0",
    "transformers==5.23.0",
)
_FILES = {"fp32": "model.onnx", "int4": "model_q4.onnx"}
_WORKER = Path(__file__).with_name("onnx_worker.py")


def build_onnx(folder: Path) -> Path:
    """The environment's Python, made if it is not there. Raises ResourceError if a step fails."""
    return make_environment(folder / f"onnx-{VERSION}", _PACKAGES)


def export(python: Path, checkpoint: Path, output: Path) -> Path:
    """The folder of the exported model, made if it is not there. Raises ResourceError."""
    if not output.is_dir():
        with atomic_directory(output) as partial:
            (partial / "onnx").mkdir()
            for precision, name in _FILES.items():
                run([str(python), "-I", str(_WORKER), str(checkpoint), str(partial / "onnx" / name), precision])
            for path in checkpoint.glob("*.json"):
                shutil.copy(path, partial)
    return output


def main() -> None:
    """Parse the command line, build, export."""
    parser = command_line(__doc__)
    for name in ("folder", "checkpoint", "model"):
        parser.add_argument(name, type=Path)
    options = parser.parse_args()
    export(build_onnx(options.folder), options.checkpoint, options.model)


if __name__ == "__main__":
    run_program(main)
