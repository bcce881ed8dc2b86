"""The library inside other frameworks: one module per framework, which only users of the framework import."""
