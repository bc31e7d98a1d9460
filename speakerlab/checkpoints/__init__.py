"""Models on disk: published folders, their provenance, foreign toolkits and the hub."""
