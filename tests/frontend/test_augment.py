"""The module that applies all augmentations: rows that were not drawn, the order, the precision."""

import numpy as np
import torch
from batches import (
    S,
    apply_all,
    codec_draw,
    decaying_room,
    int16_noise,
    make_batch,
    noise_draw,
)

from speakerlab.core.batch import Draw
from speakerlab.frontend.augment import Augment, Augmentation
from speakerlab.frontend.augment.codec import Codec
from speakerlab.frontend.augment.noise import Noise, noise_bytes
from speakerlab.frontend.augment.room import Room, room_bytes
from speakerlab.frontend.augment.specaugment import SpecAugment
from speakerlab.frontend.augment.speed import Speed
from speakerlab.frontend.augment.telephone import Telephone

SPEEDS = (1.0, 0.9, 1.1)


def make_noise() -> Noise:
    noises = []
    for seed in range(3):
        length = 7000 + 999 * seed
        noises.append(int16_noise(length, seed=seed))
    return Noise(
        noise_prob=1,
        noises=noises,
        noise_kinds=3 * ["noise"],
        num_samples=S,
    )


def make_parts() -> dict[str, Augmentation]:
    rooms = []
    for seed in range(3):
        delay = 60 * seed
        rooms.append(decaying_room(5000, seed=seed, delay=delay))
    room = Room(
        room_prob=1,
        rooms=rooms,
        num_samples=S,
    )
    spec = SpecAugment(
        num_frames=50,
        num_mel_bins=80,
        num_time_masks=1,
    )
    return {
        "speed": Speed(speeds=SPEEDS, num_samples=S),
        "room": room,
        "noise": make_noise(),
        "telephone": Telephone(telephone_prob=1, num_samples=S),
        "codec": Codec(codec_prob=1),
        "spec": spec,
    }


def make_draws(row: int) -> dict[str, Draw]:
    """Some of the augmentations, or none, depending on the row."""
    noise_of_row = noise_draw(
        make_noise(),
        noises=row % 3,
        starts=13 * row,
        snr_db=2.0 * row - 5,
    )
    draws = {
        "speed": Draw({}, 1 + row % 2),
        "room": Draw({"room": row % 3}),
        "noise": noise_of_row,
        "telephone": Draw({}),
        "codec": codec_draw(row % 2),
    }
    names = list(draws)
    names_of_row = names[row % 3 : row % 7]
    return {name: draws[name] for name in names_of_row}


def test_rows_that_were_not_drawn_are_the_samples_over_32768():
    num_samples = round(S * 1.1)
    wave_BS = int16_noise(20, num_samples, seed=1)
    wave_BS[0, :2] = [-32768, 32767]
    drawn = {row: make_draws(row) for row in range(20)}

    out_BS = apply_all(make_parts(), wave_BS, drawn)
    assert out_BS.dtype == torch.float32
    assert out_BS.shape == (20, S)

    untouched_rows = [row for row, draws in drawn.items() if not draws]
    assert 0 in untouched_rows
    assert 3 < len(untouched_rows) < 15

    plain_BS = torch.from_numpy(wave_BS[:, :S]) / 32768
    for row in range(20):
        is_plain = torch.equal(out_BS[row], plain_BS[row])
        assert is_plain == (row in untouched_rows), row


def test_the_order_is_that_of_the_mapping():
    parts = make_parts()
    del parts["speed"]
    del parts["spec"]
    wave_BS = int16_noise(1, S, seed=43)
    draws = {
        "room": Draw({"room": 1}),
        "noise": noise_draw(make_noise(), 1, 5, snr_db=6.0),
        "telephone": Draw({}),
        "codec": codec_draw(0),
    }

    # Apply the parts by hand, one after another.
    expected_BS = torch.from_numpy(wave_BS / 32768).float()
    for name, part in parts.items():
        draws_of_part = {name: draws[name]}
        batch = make_batch(wave_BS, {0: draws_of_part})
        (stacked_draws,) = batch.draws[name]
        expected_BS = part.apply(expected_BS, stacked_draws)

    out_BS = apply_all(parts, wave_BS, {0: draws})
    assert torch.equal(out_BS, expected_BS)


def test_features_are_masked_after_the_waves():
    spec = SpecAugment(
        num_frames=50,
        num_mel_bins=80,
        num_time_masks=1,
        max_time_width=20,
    )
    parts = {**make_parts(), "spec": spec}
    augment = Augment(parts, num_samples=S)
    # Of row 1, mask the widest span from the first frame on.
    mask_M2 = np.array([[0.99, 0.0]], dtype=np.float32)
    spec_draw = Draw(spec.masks(mask_M2))
    wave_BS = int16_noise(2, S, seed=3)
    batch = make_batch(wave_BS, {1: {"spec": spec_draw}})
    plain_BS = batch.wave_BS / 32768
    assert torch.equal(augment(batch), plain_BS)

    ones_BTF = torch.ones(2, 50, 80)
    feats_BTF = augment.features(ones_BTF, batch)
    plain_TF, masked_TF = feats_BTF
    assert (plain_TF == 1).all()
    assert not masked_TF[:20].any()
    assert (masked_TF[20:] == 1).all()


def test_autocast_does_not_reach_it():
    wave_BS = int16_noise(7, S, seed=17)
    drawn = {row: make_draws(row) for row in range(7)}
    batch = make_batch(wave_BS, drawn)
    augment = Augment(make_parts(), num_samples=S)
    plain = augment(batch)
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = augment(batch)
    assert torch.equal(under_autocast, plain)


def test_banks_enter_no_state_dict_and_take_the_bytes_said():
    room_lengths = [900, 5000]
    rooms = []
    for length in room_lengths:
        rooms.append(decaying_room(length, seed=18, delay=100))
    room = Room(
        room_prob=1,
        rooms=rooms,
        num_samples=S,
    )
    bytes_of_rooms = room_bytes(room_lengths, sample_rate=16000)

    noise_lengths = [50, 7000, 9000]
    noise = Noise(
        noise_prob=1,
        noises=[int16_noise(length, seed=19) for length in noise_lengths],
        noise_kinds=3 * ["music"],
        num_samples=S,
    )
    bytes_of_noises = noise_bytes(noise_lengths, num_samples=S)

    for part, expected_bytes in ((room, bytes_of_rooms), (noise, bytes_of_noises)):
        assert part.state_dict() == {}
        bank_bytes = sum(buffer.nbytes for buffer in part.buffers())
        assert bank_bytes == expected_bytes

    # 1 s of float32 a room.
    assert room_bytes([], sample_rate=16000) == 0
    assert room_bytes([50000], sample_rate=16000) == 64000
    # int16 of a noise, looped by S - 1 samples, and of S of silence.
    looped = 160000 + 47999
    expected_bytes = 2 * (looped + 48000)
    assert noise_bytes([160000], num_samples=48000) == expected_bytes
