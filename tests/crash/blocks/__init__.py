"""Crash states of real file systems, made from the log of every write that reached their disk."""
