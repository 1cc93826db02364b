"""`python -m ga_model demo`: train a small network four ways, and report whether they agree."""
