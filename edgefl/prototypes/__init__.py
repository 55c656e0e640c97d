"""Class prototypes: tables, merging, matching."""
