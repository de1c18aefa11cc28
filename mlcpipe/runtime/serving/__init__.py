"""Engines that answer requests of several callers, behind one interface."""
