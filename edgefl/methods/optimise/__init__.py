"""Steps of the server from the previous state of a part, by the combined updates, to the next."""
