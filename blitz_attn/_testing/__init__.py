"""The parts of `blitz_attn.testing` that are in files of their own. Public through that module."""
