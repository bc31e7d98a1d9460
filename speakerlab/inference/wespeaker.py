"""Export of a published model for the programs that run WeSpeaker's ONNX models.

In: a model. Out: an ONNX file that takes `feats`, float32 (B, T, 80), and returns `embs` (B, D), as
`wespeaker/bin/export_onnx.py` writes them (wenet-e2e/wespeaker at dfa7419). WeSpeaker's
`infer_onnx.py`, its C++ runtime and `ONNXWeSpeakerPretrainedSpeakerEmbedding` of pyannote.audio
4.0.7 compute the features themselves, always those of conf/features/wespeaker.yaml, and subtract
their mean over the time. pyannote.audio also leaves out the frames of other speakers, and takes an
embedding of NaN as that of too little speech.
Letters: B rows, S samples, T frames, F mel bins, N recordings, D embedding dimensions.
"""

import inspect
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from speakerlab.checkpoints.model_files import read_settings
from speakerlab.core.atomic import replacing
from speakerlab.core.counting import count_of
from speakerlab.data.convert import read_wave
from speakerlab.embedder import Embedder
from speakerlab.frontend.fbank import Fbank
from speakerlab.inference import export
from speakerlab.inference.onnx_model import open_session
from speakerlab.inference.speaker_model import SpeakerModel
from speakerlab.inference.torch_model import TorchModel

log = logging.getLogger(__name__)

# Between the embeddings of their features and of ours, of the worst recording.
MIN_COSINE = 0.99
# Where WeSpeaker's features differ from the defaults of `Fbank`.
SETTINGS: dict[str, Any] = {"window": "hamming", "scale": 32768.0}
# Settings that decide what `feats` is; with others, the graph has no right input.
FIXED = ("kind", "sample_rate", "num_mel_bins", "mean_norm")
# Fewer frames give NaN: those of WeSpeaker's ResNets, whose deviation over a single frame of their
# last map is NaN, and which pyannote.audio searches for.
SHORTEST = 9


class OfTheirFeatures(export.OfFeatures):
    """Module to export: the embedding of `feats`, and NaN if there are too few of them."""

    input = "feats"
    output = "embs"

    def __init__(self, embedder: Embedder) -> None:
        super().__init__(embedder)
        self.min_frames = int(embedder.backbone.min_frames)  # pyright: ignore[reportArgumentType]
        self.shortest = max(SHORTEST, self.min_frames)
        # What the exporter checks must have enough frames.
        later_frames = self.shortest - 1
        frontend = embedder.frontend
        self.min_samples = frontend.min_samples + later_frames * frontend.frame_shift

    def forward(self, wave: Tensor) -> Tensor:
        """Return emb_BD of features: `wave` is the name of the input in the class above."""
        feats_BTF = wave
        if self.min_frames > 1:
            # Without this, the network would end with an error, not with NaN.
            num_frames = feats_BTF.shape[1]
            num_missing: Any = torch.sym_max(self.min_frames - num_frames, 0)
            feats_BTF = functional.pad(feats_BTF, (0, 0, 0, num_missing))
        emb_BD = super().forward(feats_BTF)
        # Counted as a tensor, because the graph has no branch on the number of frames.
        one_BT = torch.ones_like(wave[:, :, 0])
        num_frames_B1 = one_BT.sum(1, keepdim=True)
        return torch.where(num_frames_B1 < self.shortest, torch.nan, emb_BD)


def export_wespeaker(
    source: Path, out: Path, *, test: Sequence[Path] = (), force: bool = False
) -> float | None:
    """Export the model of a folder or experiment; return the lowest cosine with our embeddings.

    test: recordings of speech to compare on; needed if the features of the model are not quite
    WeSpeaker's. Raises ValueError if the features cannot fit, if they differ and there is no test,
    or if the lowest cosine is below MIN_COSINE and not `force`.
    """
    runtime = TorchModel(source, device="cpu")
    embedder = runtime.embedder
    differences = differences_of(embedder, source)
    if differences and not test:
        raise ValueError(
            f"{source}: its features have {', '.join(differences)}; compare the embeddings"
            " on recordings of speech with --test FILE..., or train with"
            " conf/features/wespeaker.yaml"
        )
    cosine = None
    with replacing(out) as partial:
        export.write_graph(
            OfTheirFeatures(embedder),
            partial,
            out,
            texts={
                "architecture": runtime.family,
                "sample_rate": str(runtime.sample_rate),
                "sha256": runtime.sha256,
            },
        )
        if test:
            cosine = compare(partial, out, runtime, test, force=force)
    if runtime.vad is not None:
        log.warning(
            "%s: the model removes silence before it embeds a recording, the file does"
            " not; give it speech only",
            out,
        )
    return cosine


def differences_of(embedder: Embedder, source: Path) -> list[str]:
    """Return how the features of a model differ from WeSpeaker's; ValueError if they cannot fit."""
    frontend = embedder.frontend
    if not isinstance(frontend, Fbank):
        raise ValueError(
            f"{source}: has a pretrained model as its front end, WeSpeaker's programs only"
            " mel features; use --format onnx"
        )
    ours = read_settings(source)["frontend"]
    differences: list[str] = []
    for name, theirs in their_settings().items():
        value = ours.get(name, theirs)
        # Noise is only added in training.
        if value == theirs or name == "dither":
            continue
        difference = f"{name} {value} instead of {theirs}"
        if name in FIXED:
            raise ValueError(
                f"{source}: its features have {difference}, which WeSpeaker's programs do"
                " not compute; use --format onnx, or train with"
                " conf/features/wespeaker.yaml"
            )
        differences.append(difference)
    return differences


def their_settings() -> dict[str, Any]:
    """Return the arguments of `Fbank` for WeSpeaker's features."""
    parameters = inspect.signature(Fbank).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    return {**defaults, **SETTINGS}


def compare(
    file: Path, out: Path, runtime: TorchModel, test: Sequence[Path], *, force: bool
) -> float:
    """Return the lowest cosine between the file's embeddings of their features and ours."""
    session = open_session(file)
    their_features = Fbank(**their_settings()).eval()
    names = [str(path) for path in test]
    waves = [read_wave(name, sample_rate=runtime.sample_rate) for name in names]
    embeddings: list[np.ndarray] = []
    for wave_S in waves:
        float_S = np.ascontiguousarray(wave_S, dtype=np.float32)
        wave_1S = torch.from_numpy(float_S)[None]
        feats_1TF = their_features(wave_1S).numpy()
        (emb_1D,) = session.run(["embs"], {"feats": feats_1TF})
        embeddings.append(emb_1D[0])
    ours_ND = SpeakerModel(runtime).embed_many(waves)
    cosine, worst = export.lowest_cosine(ours_ND, np.stack(embeddings), names)
    comparison = f"cosine >= {cosine:.6f} with WeSpeaker's features ({worst})"
    if not cosine >= MIN_COSINE and not force:
        raise ValueError(
            f"{out}: {comparison}, must be {MIN_COSINE}; train with"
            " conf/features/wespeaker.yaml, or write the file nevertheless with --force"
        )
    log.info("%s: %s, on %s", out, comparison, count_of(len(names), "recording"))
    return cosine
