"""What the command line does, a module for each verb. Knows no engine."""
