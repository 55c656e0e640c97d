"""The slots of a round on the server."""
