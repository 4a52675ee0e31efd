"""Reproducible randomness."""

from random import Random

__all__ = ["Random", "chance"]


def chance(seed: int) -> Random:
    """A generator whose draws depend only on the seed."""
    return Random(seed)
