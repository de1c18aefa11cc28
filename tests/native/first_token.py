"""What a process has of a model by its first token, through the C API: LIBRARY BUNDLE RUNS prints lines of JSON.

Seconds of opening and until the first token after it, and private bytes with the model beside those before.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

sys.modules["torch"] = None  # type: ignore[assignment]  # tvm_ffi would load it, a second for each of these processes

from tests.native.engine import Runtime


def private_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))


runtime, bundle = Runtime(Path(sys.argv[1])), Path(sys.argv[2])
for _ in range(int(sys.argv[3])):
    before, began = private_bytes(), time.perf_counter()
    engine = runtime.open(bundle)
    opened = time.perf_counter()
    engine.generate(messages=[{"role": "user", "content": "Hello!"}], max_tokens=1)
    first = time.perf_counter()
    line = {"open_s": opened - began, "first_s": first - opened, "private_bytes": private_bytes() - before}
    sys.stdout.write(json.dumps(line) + "\n")
    engine.call("close")
