"""What was never written by holdfast: every lie is refused."""
