"""Reports of what a server refuses, bounded in lines: requests (log.py), and receives that may not wait (waits.py)."""
