"""The bytes on disk: golden files, and a reader that shares no code with holdfast."""
