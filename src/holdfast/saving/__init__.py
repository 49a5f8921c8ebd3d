"""A save: what it was asked for, what the ranks agree on, and the walk itself."""
