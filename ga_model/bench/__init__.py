"""`python -m ga_model bench`: compare time and memory of every way to train."""
