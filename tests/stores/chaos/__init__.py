"""The parts of `chaos_loop.py`: a proxy that harms requests, ranks, rounds, races and an oracle."""
