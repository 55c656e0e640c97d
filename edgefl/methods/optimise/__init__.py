"""How the aggregated update changes the global model."""
