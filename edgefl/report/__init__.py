"""Ledger rows to terminal, JSON, CSV and HTML."""
