"""Reads the files of a data directory past SQLite, which stops at the first thing that is wrong."""
