"""Chunked transfer of objects: sender and receiver as pure state machines."""
