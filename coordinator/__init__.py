"""The coordinator: schedules stages, decides who is eligible, aggregates, keeps the ledger."""
