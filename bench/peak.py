"""Runs a command some times and adds a line of JSON: each run's seconds, and the most memory of all of them.

    python peak.py COUNT COMMAND ...

Unix only: `getrusage(2)` of children that ended. The command's own output is printed once.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time


def main() -> int:
    """Run, print, return the status of the first run that failed."""
    count, command = int(sys.argv[1]), sys.argv[2:]
    seconds, printed = [], ""
    for _ in range(count):
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds.append(time.perf_counter() - began)
        printed = done.stdout
        if done.returncode:
            sys.stderr.write(done.stderr)
            return done.returncode
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    peak *= 1 if sys.platform == "darwin" else 1024  # kilobytes on Linux, bytes on macOS
    sys.stdout.write(printed + json.dumps({"wall_s": seconds, "peak_rss_bytes": peak}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
