"""What each paper claims, tested in a regime in which the paper would expect it: one YAML file a paper."""
