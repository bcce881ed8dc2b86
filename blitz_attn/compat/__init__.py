"""The interfaces of upstream packages (names, order of arguments, defaults) to this library: one module per package."""
