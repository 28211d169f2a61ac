"""The demonstration: a real small model, served by the demo recipe on this machine's CPU."""
