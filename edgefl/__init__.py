"""EdgeFL: train multimodal models across small devices inside each device's real budget, and see what it cost."""

__version__ = "0.1.0"
#: Version of the messages between agents and coordinator. Goes up by one with every minor release, whether or not a
#: message changed, so that it counts them over a major release too (docs/protocol.md).
PROTOCOL_VERSION = 1
