"""Block lists, with one file for each thing that is done with them. Public through `blitz_attn.sabi`."""
