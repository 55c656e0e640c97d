"""Methods and data that come to EdgeFL from outside, by entry points."""
