"""speakerlab: train, evaluate and ship speaker-embedding models."""

__version__ = "0.1.0"
