"""Methods, an encoder kind and data that come to EdgeFL from outside, by entry points."""
