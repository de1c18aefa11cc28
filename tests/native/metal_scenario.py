"""Greedy tokens of a program with a model's static library on the emulated GPU: LIBRARY FOLDER DATA COUNT PROMPT…"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.modules["torch"] = None  # type: ignore[assignment]  # tvm_ffi would load it, a second for each of these processes

from tests.metal import emulation
from tests.native.engine import Runtime

library, folder, data = map(Path, sys.argv[1:4])
count, *prompt = map(int, sys.argv[4:])
emulation.start_native(library, folder)
engine = Runtime(library).open(data)
answer = engine.generate(prompt, max_tokens=count)
sys.stdout.write(json.dumps({"device": engine.device, "tokens": answer.tokens}))
engine.call("close")
