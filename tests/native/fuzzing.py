"""How long the fuzzers of the native runtime run."""

from __future__ import annotations

import os

FUZZ_S = int(os.environ.get("MLCPIPE_FUZZ_SECONDS", "1800"))
