"""The receiving side of an ordered queue: the receiver, what fetches for it, and the order without I/O."""
