"""Orders of tokens, rules and block lists for videos. Public through `blitz_attn.video`."""
