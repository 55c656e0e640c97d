"""Values to bytes and back: pure."""
