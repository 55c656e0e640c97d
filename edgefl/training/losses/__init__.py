"""Terms of the local loss as pure functions of tensors: one method, one file."""
