"""Measurements; `make help` lists them."""
