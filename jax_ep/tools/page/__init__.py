"""The page that `python -m jax_ep report` writes: its charts, its words, its style."""
