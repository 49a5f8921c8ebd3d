"""Who writes and reads what. Pure functions: same input, same plan, on every rank."""
