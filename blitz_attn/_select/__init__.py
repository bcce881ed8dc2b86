"""What `blitz_attn.select` is made of: choosers and budgets, the calls, and what a choice keeps."""
