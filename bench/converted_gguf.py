"""Converts a checkpoint of any family to GGUF by llama.cpp's own converter and quantizer, with a made-up vocabulary.

    python -m bench.converted_gguf CHECKPOINT FILE.gguf --llama-bench FOLDER/build-0.3.36/bin/llama-bench [--type Q4_0]

Every matrix has the type, the embedding and the output included, as in `make_gguf.py`. The converter needs torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from bench.program import command_line, run_program
from mlcpipe.errors import ResourceError

# Runs in a process of its own, with llama.cpp's modules: its converter, but for the vocabulary, which none of its
# classes makes up. llama-bench feeds token ids.
_PROGRAM = """
import sys
sys.path[:0] = [sys.argv.pop(1), sys.argv.pop(1)]
import convert_hf_to_gguf as converter
from bench.make_gguf import add_vocabulary
found = converter.get_model_class
def with_made_up_words(*args, **options):
    made = found(*args, **options)
    made.set_vocab = lambda self: add_vocabulary(self.gguf_writer, self.hparams["vocab_size"])
    return made
converter.get_model_class = with_made_up_words
converter.main()
"""


def converted_gguf(checkpoint: Path, path: Path, llama_bench: Path, kind: str = "Q4_0") -> Path:
    """Write `checkpoint` to `path`, which appears whole or not at all. Raises ResourceError if a program fails."""
    sources = sorted(llama_bench.parent.parent.parent.glob("llama_cpp_python-*/vendor/llama.cpp"))
    if not sources:
        raise ResourceError("llama.cpp's source is missing", where=llama_bench, expected="built by build_llama_cpp")
    path.parent.mkdir(parents=True, exist_ok=True)
    whole, partial = path.with_name(path.name + ".f16"), path.with_name(path.name + ".partial")
    root = str(Path(__file__).parents[1])
    try:
        _run(
            [
                sys.executable,
                "-c",
                _PROGRAM,
                str(sources[-1]),
                root,
                str(checkpoint),
                "--outfile",
                str(whole),
                "--outtype",
                "f16",
            ]
        )
        _run([str(llama_bench.with_name("llama-quantize")), "--pure", str(whole), str(partial), kind])
        os.replace(partial, path)
    finally:
        for left in (whole, partial):
            left.unlink(missing_ok=True)
    return path


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ResourceError(f"{Path(command[0]).name} failed", found=done.stderr.strip()[-300:])


def main() -> None:
    """Parse the command line and write one file."""
    parser = command_line(__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--llama-bench", type=Path, required=True)
    parser.add_argument("--type", default="Q4_0")
    options = parser.parse_args()
    converted_gguf(options.checkpoint, options.file, options.llama_bench, options.type)


if __name__ == "__main__":
    run_program(main)
