"""Reads of committed state, on reading connections: peeks, rows, the history."""
