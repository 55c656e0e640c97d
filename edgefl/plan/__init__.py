"""From a model and a budget to stages, costs and eligibility."""
