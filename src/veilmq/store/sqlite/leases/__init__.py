"""Leases: granted to receives, and used through their handles."""
