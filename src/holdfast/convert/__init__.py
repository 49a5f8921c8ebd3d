"""Checkpoints of other formats: what can be read as one, export and import."""
