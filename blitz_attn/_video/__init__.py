"""Orders and lists of videos, by what is done with them. Public through `blitz_attn.video`."""
