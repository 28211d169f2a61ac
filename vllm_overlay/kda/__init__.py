"""A speculative step of KDA layers, for the fixes that take it: fold what was accepted, verify.

A CUDA library, and Triton without one. This module stays empty: what builds and checks the library
imports no torch.
"""
