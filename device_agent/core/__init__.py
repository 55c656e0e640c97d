"""The agent's state machine: pure functions from state and event to state and instructions."""
