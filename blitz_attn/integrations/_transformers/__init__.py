"""The private parts of `blitz_attn.integrations.transformers`. All modules here except `config` import torch."""
