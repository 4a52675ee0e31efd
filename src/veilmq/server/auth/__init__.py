"""Whom a server lets in: keys and grants of accounts, bearer tokens, hosts of development mode."""
