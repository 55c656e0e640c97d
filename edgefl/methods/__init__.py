"""Methods of the papers: a folder each, or a file, with its citation, equations, options and functions."""
