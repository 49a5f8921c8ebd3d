"""The process around the library: interrupts, forks, threads, exits, limits. Saves survive it."""
