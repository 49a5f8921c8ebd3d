"""Fronts for other frameworks: each imports its own framework only, and only when it is used."""
