"""Backup, and the check of a whole directory."""
