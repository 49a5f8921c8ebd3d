"""Observers of a run for the tools that people watch with; each needs the extra of its name."""
