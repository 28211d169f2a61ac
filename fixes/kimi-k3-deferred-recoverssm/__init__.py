"""RecoverSSM whose commit is deferred to the next verify, on Kimi-K3's stock objects."""
