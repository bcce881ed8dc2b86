"""The parts of `blitz_attn.integrations.jax`, which has all that is public."""
