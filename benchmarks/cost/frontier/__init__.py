"""The frontier of cost and accuracy over whole runs of each schedule."""
