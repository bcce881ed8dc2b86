"""The library inside other frameworks: one module a framework, which is imported by whoever uses it."""
