"""Leases: granted to receives, used by their handles."""
