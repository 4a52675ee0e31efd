"""How a message comes, where it is, and how it leaves: sends, groups, expiry, dead letters."""
