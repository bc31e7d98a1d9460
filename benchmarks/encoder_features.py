"""Crops a second from waves to the input of a pretrained encoder, beside `transformers`.

    OMP_NUM_THREADS=1 python benchmarks/encoder_features.py --json FILE

In: synthetic crops. Out: a row for w2v-BERT, wav2vec 2.0 (normalised waves) and Whisper. The other
side is the feature extractor of `transformers`, which WeSpeaker calls for w2v-BERT; both sides have
one thread, as in a worker. Before anything is timed, the features must be equal to 1e-4.

Letters: B crops, S samples, T frames, F values of a frame.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from sides import add_seconds, report, require_close, run_case, take_turns, timed, wants
from torch import Tensor

PEERS = ()  # `transformers` is a package, not a checkout
RATE = 16000
ALLOWED = 1e-4
# Of the published models.
KERNELS = (10, 3, 3, 3, 3, 2, 2)
STRIDES = (5, 2, 2, 2, 2, 2, 2)

Features = Callable[[Tensor], Tensor]  # wave_BS in [-1, 1] -> feats_BTF


def our_features(family: str) -> Features:
    """Return our input of an encoder."""
    from speakerlab.frontend import encoder_inputs

    if family == "w2v-bert":
        return encoder_inputs.StackedFbank(
            sampling_rate=RATE, num_mel_bins=80, stride=2
        )
    if family == "wav2vec2":
        return encoder_inputs.Waves(
            sampling_rate=RATE, do_normalize=True, kernels=KERNELS, strides=STRIDES
        )
    return encoder_inputs.WhisperMel(
        sampling_rate=RATE,
        feature_size=80,
        n_fft=400,
        hop_length=160,
        chunk_length=30,
    )


def their_features(family: str) -> Features:
    """Return the feature extractor of `transformers`, with its defaults."""
    import transformers

    if family == "w2v-bert":
        extractor: Any = transformers.SeamlessM4TFeatureExtractor()
        name = "input_features"
        options = {}
    elif family == "wav2vec2":
        extractor = transformers.Wav2Vec2FeatureExtractor(do_normalize=True)
        name = "input_values"
        options = {}
    else:
        extractor = transformers.WhisperFeatureExtractor()
        name = "input_features"
        # Without the 30 s of silence that only a transcription needs.
        options = {"padding": "do_not_pad"}

    def features(wave_BS: Tensor) -> Tensor:
        waves = list(wave_BS.numpy())
        batch = extractor(waves, sampling_rate=RATE, return_tensors="pt", **options)
        return batch[name]

    return features


def compare(options: argparse.Namespace) -> Iterator[Any]:
    """Yield a row for each family of encoders."""
    if os.environ.get("OMP_NUM_THREADS") != "1":
        raise SystemExit(
            "OMP_NUM_THREADS: must be 1, or NumPy's threads slow the other side; set it"
            " in front of the command"
        )
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    num_samples = round(options.crop_seconds * RATE)
    shape = (options.micro_batch, num_samples)
    wave_BS = 0.1 * torch.randn(shape, generator=generator)
    for family in ("w2v-bert", "wav2vec2", "whisper"):
        name = f"frontend.{family}.peer_transformers"
        if wants(options, name):
            ours = our_features(family)
            theirs = their_features(family)
            with torch.no_grad():
                difference = (ours(wave_BS) - theirs(wave_BS)).abs().max()
                require_close(f"{family}: features", float(difference), ALLOWED)
                runs = [partial(seconds_of, side, wave_BS) for side in (ours, theirs)]
                turns = take_turns(
                    runs, amount=options.micro_batch, seconds=options.seconds
                )
            yield report(name, turns, unit="crops/s")


def seconds_of(features: Features, wave_BS: Tensor, steps: int) -> float:
    """Return the seconds of so many calls."""
    return timed(lambda: features(wave_BS), steps=steps)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--crop-seconds", type=float, default=3.0)
    parser.add_argument("--micro-batch", type=int, default=32)
    add_seconds(parser, 10.0)


if __name__ == "__main__":
    run_case(__doc__, compare, add_options, peers=PEERS)
