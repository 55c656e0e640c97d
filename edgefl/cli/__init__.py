"""The edgefl command."""
