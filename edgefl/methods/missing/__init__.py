"""What stands in for an absent modality."""
