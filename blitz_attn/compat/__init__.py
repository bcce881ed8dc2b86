"""Upstream packages' own names, argument order and defaults over this library: one module per package."""
