"""Export of a published model for sherpa-onnx, which computes the features itself.

In: a model and test speech. Out: an ONNX file that takes `features`, float32 (B, T, 80), and
returns `embedding` (B, D). sherpa-onnx computes the features of conf/features/sherpa.yaml for
every such model; it reads only their sample rate and the range of samples from the file
(csrc/speaker-embedding-extractor-{model.cc,general-impl.h} and features.h of k2-fsa/sherpa-onnx at
1.13; 2.0.1 computes the same). The graph subtracts the mean.
Letters: B rows, S samples, T frames, N recordings, D embedding dimensions.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from speakerlab.checkpoints.model_files import read_card
from speakerlab.core.atomic import replacing
from speakerlab.core.counting import count_of
from speakerlab.data.audio import FULL_SCALE
from speakerlab.data.convert import read_wave
from speakerlab.frontend.fbank import Fbank
from speakerlab.inference import export
from speakerlab.inference.speaker_model import SpeakerModel
from speakerlab.inference.torch_model import TorchModel

log = logging.getLogger(__name__)

MIN_COSINE = 0.99  # between sherpa-onnx's embedding and ours of the worst recording
NUM_BINS = 80  # of sherpa-onnx


def export_sherpa(
    source: Path, out: Path, *, test: Sequence[Path], force: bool = False
) -> float:
    """Export the model of a folder or experiment; return the lowest cosine with our embeddings.

    test: recordings of speech. Raises ValueError if the lowest cosine is below MIN_COSINE and not
    `force`, or the graph differs from PyTorch; ModuleNotFoundError without the optional packages.
    """
    import sherpa_onnx

    runtime = TorchModel(source, device="cpu")
    embedder = runtime.embedder
    frontend = embedder.frontend
    if not isinstance(frontend, Fbank):
        raise ValueError(
            f"{source}: has a pretrained model as its front end, sherpa-onnx only mel"
            " features; use --format onnx"
        )
    if frontend.num_mel_bins != NUM_BINS:
        raise ValueError(
            f"{source}: takes {frontend.num_mel_bins} mel bins, sherpa-onnx has"
            f" {NUM_BINS}; train with conf/features/sherpa.yaml"
        )
    names = [str(path) for path in test]
    sample_rate = embedder.sample_rate
    waves = [read_wave(name, sample_rate=sample_rate) for name in names]
    ours_ND = SpeakerModel(runtime).embed_many(waves)
    with replacing(out) as partial:
        export.write_graph(
            export.OfFeatures(embedder),
            partial,
            out,
            texts=texts_of(runtime),
        )
        # Compared with sherpa-onnx itself, because it computes the features.
        config = sherpa_onnx.SpeakerEmbeddingExtractorConfig(str(partial))
        extractor = sherpa_onnx.SpeakerEmbeddingExtractor(config)
        theirs = [embed(extractor, wave_S, sample_rate) for wave_S in waves]
        cosine, worst = export.lowest_cosine(ours_ND, np.stack(theirs), names)
        comparison = f"cosine >= {cosine:.6f} with sherpa-onnx's embeddings ({worst})"
        if cosine < MIN_COSINE and not force:
            raise ValueError(
                f"{out}: {comparison}, must be {MIN_COSINE}; train with"
                " conf/features/sherpa.yaml, or write the file nevertheless with"
                " --force"
            )
    log.info("%s: %s, on %s", out, comparison, count_of(len(names), "recording"))
    return cosine


def texts_of(runtime: TorchModel) -> dict[str, str]:
    """Return the metadata that sherpa-onnx reads, and the name of the model."""
    card = read_card(runtime.source)
    languages = dict.fromkeys(card.get("train_languages", []))  # each once
    language = ", ".join(languages)
    # 1: sherpa-onnx computes the features from amplitudes, not from 16-bit samples.
    assert isinstance(runtime.embedder.frontend, Fbank)
    takes_amplitudes = runtime.embedder.frontend.scale < FULL_SCALE
    return {
        "framework": "3d-speaker",  # or wespeaker, which is treated equally
        "output_dim": str(runtime.embed_dim),
        "sample_rate": str(runtime.sample_rate),
        "normalize_samples": str(int(takes_amplitudes)),
        "language": language or "not stated",  # sherpa-onnx refuses an empty text
        "architecture": runtime.family,
        "sha256": runtime.sha256,
    }


def embed(extractor: Any, wave_S: np.ndarray, sample_rate: int) -> np.ndarray:
    """Return sherpa-onnx's emb_D of a recording."""
    stream = extractor.create_stream()
    stream.accept_waveform(sample_rate, wave_S)
    stream.input_finished()
    return np.array(extractor.compute(stream), dtype=np.float32)
