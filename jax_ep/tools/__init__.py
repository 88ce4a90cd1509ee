"""What `python -m jax_ep` runs; nothing else of the package imports it."""
