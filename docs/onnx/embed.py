"""Embeddings of wav files by an exported model; of two files, their cosine.

    python embed.py model.onnx a.wav [b.wav]

Needs numpy, soundfile and onnxruntime. Files have the model's sample rate."""

import sys

import numpy as np
import onnxruntime
import soundfile

if len(sys.argv) < 3:
    sys.exit("usage: embed.py model.onnx a.wav [b.wav]")
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
facts = session.get_modelmeta().custom_metadata_map
rate = int(facts["sample_rate"])
least = int(facts["min_samples"])
most = int(facts["max_samples"])
if "vad" in facts:
    sys.exit(f"{sys.argv[1]}: leaves out silence, use speakerlab embed instead")


def embed(path: str) -> np.ndarray:
    """float32 (D,) of a file of any length: repeated if too short, in windows if too long."""
    wave, rate_of_file = soundfile.read(path, dtype="float32", always_2d=True)
    if rate_of_file != rate:
        sys.exit(f"{path}: must have {rate} Hz, got {rate_of_file}; resample it first")
    wave = wave[:, 0] if len(wave) >= least else np.resize(wave[:, 0], least)
    count = -(-len(wave) // most)
    length, rest = divmod(len(wave), count)
    starts = [i * length + min(i, rest) for i in range(count)]
    windows = [wave[None, start : start + length] for start in starts]
    return np.mean([session.run(None, {"wave": w})[0][0] for w in windows], axis=0)


embeddings = [embed(path) for path in sys.argv[2:]]
lines = [" ".join(f"{value:.7g}" for value in emb) for emb in embeddings]
if len(embeddings) == 2:
    a, b = embeddings
    lines = [f"{a @ b / np.linalg.norm(a) / np.linalg.norm(b):.6f}"]
print(*lines, sep="\n")  # noqa: T201
