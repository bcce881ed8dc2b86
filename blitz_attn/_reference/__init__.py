"""The float64 twins of the public operations, by subject. Public through `blitz_attn.reference`."""
