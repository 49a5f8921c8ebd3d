"""Where a data loader and the random generators stand."""
