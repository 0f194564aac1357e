"""What stands in for the model: `timing.py`, whose tokens are their own numbers, or `hybrid`, which computes."""
