"""A published model as a file for sherpa-onnx, which computes the features itself.

In: a model and test speech. Out: an ONNX file that takes `features`, float32 (B, T, 80), and
returns `embedding` (B, D). sherpa-onnx gives every such model the features of
conf/features/sherpa.yaml, and reads only their sample rate and the range of samples from the file
(csrc/speaker-embedding-extractor-{model.cc,general-impl.h} and features.h of k2-fsa/sherpa-onnx at
1.13; 2.0.1 computes the same). The graph subtracts the mean.
Letters: B rows, S samples, T frames, N recordings, D embedding dimensions.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from speakerlab.checkpoints.model_files import read_card
from speakerlab.core.atomic import replacing
from speakerlab.data.audio import FULL_SCALE
from speakerlab.data.convert import read_wave
from speakerlab.inference import export
from speakerlab.inference.speaker_model import SpeakerModel
from speakerlab.inference.torch_model import TorchModel
from speakerlab.scoring.pair_scores import unit_rows

log = logging.getLogger(__name__)

MIN_COSINE = 0.99  # of sherpa-onnx's embedding with ours, for the worst recording
NUM_BINS = 80  # of sherpa-onnx


class OfFeatures(export.Traced):
    """The exported graph: the embedding of log mel energies, whose mean it subtracts."""

    input = "features"

    def input_of(self, wave: Tensor) -> Tensor:
        """Return our features; subtracting the mean again changes nothing."""
        return self.embedder.features(wave)

    def forward(self, wave: Tensor) -> Tensor:
        return super().forward(wave.clone())  # it subtracts the mean in place


def export_sherpa(source: Path, out: Path, *, test: Sequence[Path], force: bool = False) -> float:
    """Export the model of a folder or experiment; return the lowest cosine with our embeddings.

    test: recordings of speech. Raises ValueError if the lowest cosine is below MIN_COSINE and not
    `force`, or the graph differs from PyTorch; ModuleNotFoundError without the optional packages.
    """
    import sherpa_onnx

    runtime = TorchModel(source, device="cpu")
    embedder = runtime.embedder
    if embedder.fbank.num_mel_bins != NUM_BINS:
        raise ValueError(
            f"{source}: takes {embedder.fbank.num_mel_bins} mel bins, sherpa-onnx has {NUM_BINS}; "
            "train with conf/features/sherpa.yaml"
        )
    names = [str(path) for path in test]
    waves = [read_wave(name, sample_rate=embedder.sample_rate) for name in names]
    ours_ND = SpeakerModel(runtime).embed_many(waves)
    with replacing(out) as partial:
        export.write_graph(OfFeatures(embedder), partial, out, texts=texts_of(runtime))
        config = sherpa_onnx.SpeakerEmbeddingExtractorConfig(str(partial))
        extractor = sherpa_onnx.SpeakerEmbeddingExtractor(config)
        theirs_ND = np.stack([embed(extractor, wave_S, embedder.sample_rate) for wave_S in waves])
        cosine_N = np.sum(unit_rows(ours_ND, names) * unit_rows(theirs_ND, names), axis=1)
        cosine, worst = min(zip(cosine_N.tolist(), names))
        found = f"cosine >= {cosine:.6f} with sherpa-onnx's embeddings ({worst})"
        if cosine < MIN_COSINE and not force:
            raise ValueError(
                f"{out}: {found}, must be {MIN_COSINE}; train with conf/features/sherpa.yaml, or "
                "write the file nevertheless with --force"
            )
    log.info("%s: %s, on %d recordings", out, found, len(names))
    return cosine


def texts_of(runtime: TorchModel) -> dict[str, str]:
    """Return the metadata: what sherpa-onnx reads, and which model it is."""
    languages = read_card(runtime.source).get("train_languages", [])
    return {
        "framework": "3d-speaker",  # or wespeaker, which is treated equally
        "output_dim": str(runtime.embed_dim),
        "sample_rate": str(runtime.sample_rate),
        "normalize_samples": str(int(runtime.embedder.fbank.scale < FULL_SCALE)),
        "language": ", ".join(dict.fromkeys(languages)) or "not stated",  # empty is refused
        "architecture": runtime.family,
        "sha256": runtime.sha256,
    }


def embed(extractor: Any, wave_S: np.ndarray, sample_rate: int) -> np.ndarray:
    """Return sherpa-onnx's emb_D of a recording."""
    stream = extractor.create_stream()
    stream.accept_waveform(sample_rate, wave_S)
    stream.input_finished()
    return np.array(extractor.compute(stream), dtype=np.float32)
