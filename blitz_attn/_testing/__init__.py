"""What `blitz_attn.testing` is made of, beside its own functions. Public through it."""
