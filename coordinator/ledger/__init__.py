"""The ledger: assignments, costs and rounds in a SQL database."""
