"""What `blitz_attn.integrations.diffusers` is made of."""
