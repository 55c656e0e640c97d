"""Own data from init to a served model, beside simple baselines."""
