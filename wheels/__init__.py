"""Makes wheels for platforms: see build.py."""
