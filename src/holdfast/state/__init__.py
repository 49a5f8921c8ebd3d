"""Python state ⇄ named shards. Knows torch; knows no files and no other ranks."""
