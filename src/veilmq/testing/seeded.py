"""Chance that can be repeated."""

from random import Random

__all__ = ["Random", "chance"]


def chance(seed: int) -> Random:
    """A generator whose draws follow from the seed alone."""
    return Random(seed)
