"""Reports of a run from its ledger: terminal, JSON, CSV, Parquet and HTML."""
