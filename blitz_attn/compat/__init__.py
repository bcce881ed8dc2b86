"""The names, argument order and defaults of upstream packages, computed by this library: one module per package."""
