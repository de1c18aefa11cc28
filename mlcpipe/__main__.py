"""The program `mlcpipe`, also as `python -m mlcpipe`."""

from __future__ import annotations

import os
import signal
import sys
import threading

_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def main() -> int:
    """Run the command line and return its exit code; Ctrl-C ends the program silently from the first import on."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else the caller wants it ignored
        signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
    from mlcpipe.cli import main as run

    try:
        signal.signal(signal.SIGINT, before)
        code = run()
    except KeyboardInterrupt:  # before or after `run`
        code = _INTERRUPTED
    if any(thread.name == "mlcpipe-loading" for thread in threading.enumerate()):
        os._exit(code)  # else Python ends the loading thread, whose native code calls std::terminate
    return code


if __name__ == "__main__":
    sys.exit(main())
