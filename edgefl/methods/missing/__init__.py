"""Stand-ins for an absent modality."""
