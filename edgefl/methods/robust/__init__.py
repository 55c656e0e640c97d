"""Combination that a share of broken or hostile devices does not ruin: medians, trimmed means, Krum, clipping."""
