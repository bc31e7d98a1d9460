"""Configuration: YAML layers to a checked `Config`, and a `Config` to objects."""
