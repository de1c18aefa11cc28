"""`python -m mlcpipe` is `mlcpipe`."""

from __future__ import annotations

import sys

from mlcpipe.cli import main

if __name__ == "__main__":
    sys.exit(main())
