"""Tuning records: knobs measured to be faster, per kernel and device."""
