"""Chunked transfer of objects: sender and receiver as pure state machines, and their driver for objects on disk.

Both directions use the same two: an agent receives the parts of an offer and sends those of its update. No clock and
no I/O: ``now`` (seconds, any origin, never backwards) is an argument, and each event returns the instructions to carry
out, in order.

The receiver opens an *epoch* with a Need that holds the bitmap of everything it lacks, acknowledges every half window,
and opens another epoch when nothing arrives. A sender keeps at most ``credit`` chunks unacknowledged per receiver and
epoch. Receivers that ask at about the same time are *in step*: what more than half of them (and at least two) lack is
published once, on the shared topic, at the pace of the slowest; the rest goes to each alone. A receiver that blocks the
others for PACE_STALL_S falls out of step: it is then served alone, and joins again when no receiver is in step any
more. The broker still delivers to it what is published for all, which counts in its window but waits for no room there.
"""
