"""The private parts of `blitz_attn.integrations.vllm`."""
