"""Where a path went another way and why a program is new, kept when it happens."""
