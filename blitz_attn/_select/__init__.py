"""What `blitz_attn.select` is made of: choosers, budgets, the calls, and measures of how much softmax mass a choice keeps."""
