"""A speculative step of KDA layers, for several fixes: fold what was accepted, verify the window.

Importing this package imports neither torch nor Triton; its modules do.
"""
