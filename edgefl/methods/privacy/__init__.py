"""Privacy of a device as a whole: clipped changes, Gaussian noise, and the account of what they cost."""
