"""The device agent: a light supervisor and a warm trainer process."""
