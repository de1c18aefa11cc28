"""Links object files into shared libraries for Linux without a linker (System V ABI, and its supplements)."""
