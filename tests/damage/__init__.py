"""What is damaged after it was written: every bit of it is found."""
