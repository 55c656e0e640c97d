"""Terms of the local loss, one file each."""
