"""A load, and a checkpoint that is looked into."""
