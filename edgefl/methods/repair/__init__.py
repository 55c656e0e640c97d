"""What is replaced in updates before they are aggregated."""
