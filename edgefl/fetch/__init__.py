"""Public data sets by name: downloaded, checked against a known hash, and converted to what ``edgefl.data`` reads."""
