"""Who else is here: the ranks that save or load together."""
