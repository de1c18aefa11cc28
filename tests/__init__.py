"""The tests. Matrices here are tiny, and pytest runs a worker per CPU: threads of torch and numpy would only wait."""

import os

for _name in ("MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # torch reads the first; TVM reads neither
    os.environ.setdefault(_name, "1")
