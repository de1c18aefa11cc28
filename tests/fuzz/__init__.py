"""Fuzzers of bundles and checkpoints: `python -m tests.fuzz bundle FOLDER --seconds 600`.

A case is made from its seed alone. A forked child of bounded memory and time runs the command line on it; good are exit
0, and exit 2 with one line. `corpus.json` keeps the seeds that were interesting.
"""
