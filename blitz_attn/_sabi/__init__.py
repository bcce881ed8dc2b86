"""Block lists, by what is done with them. Public through `blitz_attn.sabi`."""
