"""vllm-overlay: a recipe serves a model with vLLM, with exactly its fixes in every process.

This module stays empty: every Python process of the environment imports it.
"""
