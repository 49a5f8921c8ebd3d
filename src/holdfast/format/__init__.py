"""What the bytes mean (docs/format.md). No I/O, no torch."""
