"""Joint steps (docs/decisions/0111): their measurement beside one by one."""
