"""YAML files to frozen values."""
