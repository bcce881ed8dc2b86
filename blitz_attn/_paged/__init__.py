"""Calls over paged caches. Public through `blitz_attn.paged` and `blitz_attn.quest`."""
