"""Moves bytes between tensors and stores. Knows plans and formats; decides nothing."""
