"""The pages: their code runs, and what they name exists."""
