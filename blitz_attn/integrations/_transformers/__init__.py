"""What `blitz_attn.integrations.transformers` is made of. The modules here import torch and transformers."""
