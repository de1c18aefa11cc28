"""`make check-gpu`: everything that only a GPU can tell, in one command without arguments."""
