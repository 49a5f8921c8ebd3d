"""The command line: what it prints, what it returns, and what it refuses to print."""
