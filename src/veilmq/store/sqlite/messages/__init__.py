"""How a message enters a queue, where it is, and how it leaves: sends, groups, expiry, dead letters."""
