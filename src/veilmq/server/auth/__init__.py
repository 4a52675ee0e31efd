"""Whom a server lets in: keys and grants of accounts, bearer tokens, and the hosts of development mode."""
