"""The parts of `blitz_attn.select`: choosers, budgets, the calls, and measures of the softmax mass that a choice keeps."""
