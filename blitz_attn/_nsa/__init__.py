"""The parts of native sparse attention. Public through `blitz_attn.nsa`."""
