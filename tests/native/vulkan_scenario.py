"""Opens a bundle in a process of its own: LIBRARY CACHE BUNDLE [GPU BUNDLE], the second one for "auto".

Prints the device and the first greedy tokens, or the error, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.modules["torch"] = None  # type: ignore[assignment]  # tvm_ffi would load it, a second for each of these processes

from tests.native.engine import NativeError, Runtime

library, cache, bundle, *gpu = map(Path, sys.argv[1:])
try:
    options = {"device": "auto", "gpu_path": gpu[0]} if gpu else {}
    engine = Runtime(library).open(bundle, cache=cache, **options)
    sys.stdout.write(json.dumps({"device": engine.device, "tokens": engine.generate([1, 2, 3], max_tokens=5).tokens}))
    engine.call("close")
except NativeError as error:
    sys.stdout.write(json.dumps({"error": str(error), "code": error.code}))
