"""The module that applies all augmentations: rows that were not drawn, the order, the precision."""

import numpy as np
import torch
from batches import S, apply_all, codec_draw, decaying_room, int16_noise, make_batch, noise_draw

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
    noises = [int16_noise(7000 + 999 * s, seed=s) for s in range(3)]
    return Noise(noise_prob=1, noises=noises, noise_kinds=3 * ["noise"], num_samples=S)


def make_parts() -> dict[str, Augmentation]:
    rooms = [decaying_room(5000, seed=s, delay=60 * s) for s in range(3)]
    return {
        "speed": Speed(speeds=SPEEDS, num_samples=S),
        "room": Room(room_prob=1, rooms=rooms, num_samples=S),
        "noise": make_noise(),
        "telephone": Telephone(telephone_prob=1, num_samples=S),
        "codec": Codec(codec_prob=1),
        "spec": SpecAugment(num_frames=50, num_mel_bins=80, num_time_masks=1),
    }


def make_draws(row: int) -> dict[str, Draw]:
    draws = {"speed": Draw({}, 1 + row % 2), "room": Draw({"room": row % 3})}
    draws["noise"] = noise_draw(make_noise(), row % 3, 13 * row, 2.0 * row - 5)
    draws |= {"telephone": Draw({}), "codec": codec_draw(row % 2)}
    return dict(list(draws.items())[row % 3 : row % 7])


def test_rows_that_were_not_drawn_are_the_samples_over_32768():
    wave_BS = int16_noise(20, round(S * 1.1), seed=1)
    wave_BS[0, :2] = [-32768, 32767]
    drawn = {row: make_draws(row) for row in range(20)}
    out_BS = apply_all(make_parts(), wave_BS, drawn)
    assert out_BS.dtype == torch.float32 and out_BS.shape == (20, S)
    plain = torch.from_numpy(wave_BS[:, :S]) / 32768
    untouched = [row for row in range(20) if not drawn[row]]
    assert 0 in untouched and 3 < len(untouched) < 15
    for row in range(20):
        assert torch.equal(out_BS[row], plain[row]) == (row in untouched), row


def test_the_order_is_that_of_the_mapping():
    parts, wave_BS = make_parts(), int16_noise(1, S, seed=43)
    del parts["speed"], parts["spec"]
    draws = {"room": Draw({"room": 1}), "noise": noise_draw(make_noise(), 1, 5, 6.0)}
    draws |= {"telephone": Draw({}), "codec": codec_draw(0)}
    wanted_BS = int16_noise(1, S, seed=43)
    wanted = torch.from_numpy(wanted_BS) / 32768
    for name, part in parts.items():
        (stacked,) = make_batch(wave_BS, {0: {name: draws[name]}}).draws[name]
        wanted = part.apply(wanted, stacked)
    assert torch.equal(apply_all(parts, wave_BS, {0: draws}), wanted)


def test_features_are_masked_after_the_waves():
    spec = SpecAugment(num_frames=50, num_mel_bins=80, num_time_masks=1, max_time_width=20)
    augment = Augment({**make_parts(), "spec": spec}, num_samples=S)
    mask_M2 = np.array([[0.99, 0.0]], dtype=np.float32)
    batch = make_batch(int16_noise(2, S, seed=3), {1: {"spec": Draw(spec.masks(mask_M2))}})
    assert torch.equal(augment(batch), batch.wave_BS / 32768)
    feats_BTF = augment.features(torch.ones(2, 50, 80), batch)
    assert (feats_BTF[0] == 1).all()
    assert not feats_BTF[1, :20].any() and (feats_BTF[1, 20:] == 1).all()


def test_autocast_does_not_reach_it():
    batch = make_batch(int16_noise(7, S, seed=17), {row: make_draws(row) for row in range(7)})
    augment = Augment(make_parts(), num_samples=S)
    plain = augment(batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(augment(batch), plain)


def test_banks_enter_no_state_dict_and_take_the_bytes_said():
    rooms = [decaying_room(length, seed=18, delay=100) for length in (900, 5000)]
    noises = [int16_noise(length, seed=19) for length in (50, 7000, 9000)]
    room = Room(room_prob=1, rooms=rooms, num_samples=S)
    noise = Noise(noise_prob=1, noises=noises, noise_kinds=3 * ["music"], num_samples=S)
    for part, size in (
        (room, room_bytes([900, 5000], sample_rate=16000)),
        (noise, noise_bytes([50, 7000, 9000], num_samples=S)),
    ):
        assert part.state_dict() == {}
        assert sum(x.nbytes for x in part.buffers()) == size
    assert room_bytes([], sample_rate=16000) == 0
    # 1 s of float32 a room; int16 of a noise, looped by S - 1 samples, and of S of silence.
    assert room_bytes([50000], sample_rate=16000) == 64000
    assert noise_bytes([160000], num_samples=48000) == 2 * (207999 + 48000)
