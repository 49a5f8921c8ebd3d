"""Chains: what a delta checkpoint is made from, and checkpoints written again."""
