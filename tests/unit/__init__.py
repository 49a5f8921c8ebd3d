"""The verbs, the state and the plans, one process each."""
