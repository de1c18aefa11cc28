"""`make check-gpu`: all checks and measurements of a GPU, in one command without arguments."""
