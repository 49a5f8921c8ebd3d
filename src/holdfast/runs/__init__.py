"""A run: its directory, when it saves, what it keeps, and how it goes on."""
