"""Is a checkpoint whole, and whose is it? Looks, repairs and signs."""
