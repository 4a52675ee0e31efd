"""The cases of the client contract: one file per noun; the package above puts them together into suites."""
