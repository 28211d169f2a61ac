"""KDA's speculative step, for the fixes that take it: a CUDA library, and Triton without one.

This module stays empty: what builds and checks the library imports no torch.
"""
