"""The trainer process: the only part of the agent that loads torch."""
