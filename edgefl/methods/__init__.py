"""Methods of the papers, by role: each in a file with its citation, equation, options and functions."""
