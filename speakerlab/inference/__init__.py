"""Using a model. In: recordings of any kind. Out: embeddings, scores, decisions, names.

`speaker_model` is the Python API; it runs on `torch_model` or `onnx_model`. What it writes is in
`enrolment` and `embedding_files`.
"""
