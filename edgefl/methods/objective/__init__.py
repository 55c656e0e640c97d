"""Terms of the local loss, by paper."""
