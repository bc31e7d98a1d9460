"""Batches with drawn rooms, noises and telephones, and what to fill them with."""

from collections.abc import Sequence

import numpy as np
import torch

from speakerlab.core.batch import Batch

S = 8001  # samples of a crop, odd on purpose
Some = int | tuple[int, ...]


def make_batch(
    wave_BS: np.ndarray,
    *,
    speeds: Sequence[int] | None = None,
    num_speeds: int = 1,
    rooms: Sequence[tuple[int, int]] = (),
    noises: Sequence[tuple[int, Some, Some, float]] = (),
    telephones: Sequence[int] = (),
    codecs: Sequence[tuple[int, int]] = (),
) -> Batch:
    """`speeds`: an index for each row; `rooms`: (row, room); `noises`: (row, noise, start, SNR),
    several noises and starts for babble; `telephones`: rows; `codecs`: (row, codec)."""
    num_rows = len(wave_BS)
    speed_B = torch.tensor(speeds if speeds is not None else [0] * num_rows)
    room_R2 = torch.tensor(rooms, dtype=torch.int64).reshape(-1, 2)
    codec_C2 = torch.tensor(codecs, dtype=torch.int64).reshape(-1, 2)
    part_V3 = torch.tensor(
        [
            [index, *part]
            for index, (_, noise, start, _) in enumerate(noises)
            for part in zip(np.atleast_1d(noise), np.atleast_1d(start))
        ],
        dtype=torch.int64,
    ).reshape(-1, 3)
    return Batch(
        wave_BS=torch.from_numpy(wave_BS),
        feats_BTF=torch.empty(0, 0, 0),
        label_B=torch.zeros(num_rows, dtype=torch.int64),
        speed_rows=tuple((speed_B == i).nonzero()[:, 0] for i in range(num_speeds)),
        room_rows=room_R2[:, 0],
        room_R=room_R2[:, 1],
        noise_rows=torch.tensor([entry[0] for entry in noises], dtype=torch.int64),
        noise_V=part_V3[:, 1],
        noise_start_V=part_V3[:, 2],
        noise_of_V=part_V3[:, 0],
        noise_NS=torch.empty(0, 0, dtype=torch.int16),
        snr_db_N=torch.tensor([entry[3] for entry in noises], dtype=torch.float32),
        telephone_rows=torch.tensor(telephones, dtype=torch.int64),
        codec_rows=codec_C2[:, 0],
        codec_C=codec_C2[:, 1],
        mask_BM2=torch.zeros(num_rows, 0, 2),
        position_B=torch.arange(num_rows),
        row_B=torch.arange(num_rows),
    )


def int16_noise(*shape: int, seed: int, deviation: float = 3000.0) -> np.ndarray:
    return (deviation * np.random.default_rng(seed).standard_normal(shape)).astype(np.int16)


def decaying_room(num_samples: int, *, seed: int, delay: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    room = 0.1 * rng.standard_normal(num_samples) * np.exp(-np.arange(num_samples) / 1500)
    room[:delay] *= 0.01
    room[delay] = 1.0
    return room


def decibels(ratio: float) -> float:
    return 10 * np.log10(ratio)
