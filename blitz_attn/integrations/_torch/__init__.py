"""The parts of `blitz_attn.integrations.torch`, which has all that is public."""
