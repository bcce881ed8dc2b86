"""What `blitz_attn.integrations.vllm` is made of."""
