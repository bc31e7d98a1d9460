"""From recordings to embeddings and decisions: the Python API, batch extraction, ONNX."""
