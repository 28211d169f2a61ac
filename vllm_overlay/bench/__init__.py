"""Measurements that are kept: a recipe with a fix on and off (``vllm-overlay bench``)."""
