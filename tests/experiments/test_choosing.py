"""The choice of a model: which utterances, noise, numbers of speakers, and words."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from refusals import refuses
from voices import RATE, make_wave, write_voices

from speakerlab.data import audio
from speakerlab.data.banks import find_recordings
from speakerlab.data.manifest import read_manifest
from speakerlab.data.tables import write_data_dir
from speakerlab.experiments import choosing
from speakerlab.experiments.choosing import RECORDED, Candidate, TrialPairs
from speakerlab.experiments.choosing_data import (
    Limits,
    Noisy,
    choose_utterances,
    cut_to,
    resampled,
)
from speakerlab.scoring.eer_intervals import Difference

GSM = ("codec of the test side", "gsm")


def test_of_20000_utterances_as_many_speakers_as_possible_are_used_evenly():
    ids = [f"u{row}" for row in range(20_000)]
    # Speaker 0 has half of the utterances, a hundred have one.
    speakers = [f"s{max(0, row - 9_999) % 300}" for row in range(19_900)]
    speakers += [f"alone{row}" for row in range(100)]
    rows = choose_utterances(ids, speakers, Limits(utterances=1000, per_speaker=20))
    assert len(rows) == 1000
    count = Counter(speakers[row] for row in rows)
    several = [number for name, number in count.items() if name.startswith("s")]
    assert len(several) == 300
    assert set(several) == {3}
    assert len(count) == 400

    # Fewer than two for each: whole pairs.
    rows = choose_utterances(ids, speakers, Limits(utterances=100, per_speaker=20))
    assert set(Counter(speakers[row] for row in rows).values()) == {2}
    # More utterances contain the smaller choice; the order of the table does not matter.
    more = choose_utterances(ids, speakers, Limits(utterances=500, per_speaker=20))
    assert set(rows) < set(more)
    limited = choose_utterances(ids, speakers, Limits(20_000, per_speaker=4))
    assert max(Counter(speakers[row] for row in limited).values()) == 4
    reversed_rows = choose_utterances(ids[::-1], speakers[::-1], Limits(100, 20))
    assert sorted(19_999 - row for row in reversed_rows) == rows


@pytest.fixture
def manifest(tmp_path):
    return read_manifest([write_voices(tmp_path / "test")], sample_rate=RATE)


def test_noise_has_its_ratio_and_depends_on_the_utterance_alone(manifest, tmp_path):
    quiet = manifest.pieces()
    for ratio in (0.0, 10.0):
        treatment = Noisy(base=manifest, snr_db=ratio)
        noisy = treatment.apply(quiet)
        for before, after in zip(quiet, noisy):
            wave = before.read().astype(float)
            noise = after.read() - wave
            assert 10 * np.log10((wave**2).mean() / (noise**2).mean()) == pytest.approx(
                ratio, abs=0.01
            )
        assert np.array_equal(noisy[1].read(), treatment.apply(quiet[1:])[0].read())
        differs = noisy[0].read()[:8000] - quiet[0].read()[:8000]
        assert not np.array_equal(
            differs, noisy[1].read()[:8000] - quiet[1].read()[:8000]
        )
    bank = find_recordings(write_voices(tmp_path / "noise"), sample_rate=RATE)
    names = {Noisy(base=manifest, snr_db=ratio).name for ratio in (5.0, 10.0)}
    names.add(Noisy(base=manifest, snr_db=10.0, noises=bank).name)
    assert len(names) == 3
    wave = quiet[0].read().astype(float)
    treatment = Noisy(base=manifest, snr_db=5.0, noises=bank)
    noise = treatment.apply(quiet)[0].read() - wave
    assert 10 * np.log10((wave**2).mean() / (noise**2).mean()) == pytest.approx(
        5, abs=0.01
    )


@pytest.mark.parametrize("has_bank", [False, True], ids=["pink", "bank"])
def test_models_of_all_rates_get_the_same_noise(manifest, tmp_path, has_bank):
    bank = ()
    if has_bank:
        bank = find_recordings(write_voices(tmp_path / "noise"), sample_rate=RATE)
    low = resampled(manifest, tmp_path / "out", sample_rate=RATE // 2)
    treatment = Noisy(base=manifest, snr_db=0.0, noises=bank)
    for piece, low_piece in zip(treatment.apply(manifest.pieces()), low.pieces()):
        (noisy_low,) = treatment.apply([low_piece])
        noise = piece.read().astype(float)
        noise -= manifest.read(piece.row, 0, piece.num_samples)
        low_noise = noisy_low.read().astype(float)
        low_noise -= low.read(low_piece.row, 0, low_piece.num_samples)
        # The band that both have, from the spectra.
        num = len(low_noise) // 2
        spectrum = np.fft.rfft(noise)[: num // 2] / len(noise)
        low_spectrum = np.fft.rfft(low_noise)[: num // 2] / len(low_noise)
        difference = np.linalg.norm(spectrum - low_spectrum)
        assert difference < 0.01 * np.linalg.norm(spectrum)


def test_a_part_has_the_noise_of_its_place_in_the_utterance(manifest):
    treatment = Noisy(base=manifest, snr_db=5.0)
    whole = manifest.pieces()[1]
    (noisy,) = treatment.apply([whole])
    (part,) = treatment.apply([replace(whole, start=3000, num_samples=5000)])
    assert np.array_equal(part.read(), noisy.read()[3000:8000])


def test_silence_between_noises_is_drawn_again(manifest, tmp_path):
    waves = {"a": np.zeros(60 * RATE, np.int16), "b": np.zeros(60 * RATE, np.int16)}
    waves["a"][-30 * RATE :] = make_wave(0, 0, 30.0)
    wavs = {}
    for name, wave in waves.items():
        wavs[name] = tmp_path / f"{name}.wav"
        audio.write(wavs[name], wave, RATE)
    write_data_dir(tmp_path / "noise", wavs=wavs)
    bank = find_recordings(tmp_path / "noise", sample_rate=RATE)
    quiet = manifest.pieces()
    for before, after in zip(
        quiet, Noisy(base=manifest, snr_db=5.0, noises=bank).apply(quiet)
    ):
        wave = before.read().astype(float)
        noise = after.read() - wave
        ratio = 10 * np.log10((wave**2).mean() / (noise**2).mean())
        assert ratio == pytest.approx(5, abs=0.01)
    (silent,) = Noisy(base=manifest, snr_db=5.0, noises=bank[1:]).apply(quiet[:1])
    with refuses("--noise", "silent", tmp_path / "b.wav"):
        silent.read()


def test_loud_speech_with_noise_is_not_clipped(manifest):
    (piece, *_) = Noisy(base=manifest, snr_db=-40.0).apply(manifest.pieces())
    wave = piece.read()
    assert np.abs(wave.astype(int)).max() <= 32767
    assert (np.abs(wave.astype(int)) == 32767).sum() <= 2


def test_a_cut_applies_to_every_treatment(manifest):
    pieces = cut_to(Noisy(base=manifest, snr_db=10.0), 0.5).apply(manifest.pieces())
    assert {piece.num_samples for piece in pieces} == {RATE // 2}


@pytest.fixture
def make_candidate():
    """make_candidate("a", spread) -> a model whose utterances scatter so much, of 20 speakers."""
    speakers = np.arange(20).repeat(4)
    pairs = TrialPairs.of_speakers(speakers)
    rng = np.random.default_rng(0)
    centre = rng.standard_normal((20, 8))[speakers]
    shared = rng.standard_normal((80, 8))
    ids = [str(row) for row in range(80)]

    def make(name, spread, *, gsm=None, speed=1.0):
        estimates = {}
        for condition, scatter in ((RECORDED, spread), (GSM, gsm or spread)):
            emb = centre + scatter * shared
            estimates[condition] = pairs.estimate(pairs.scores(emb, emb, ids))
        return Candidate(
            name=name,
            sha256=name,
            sample_rate=RATE,
            megabytes=1.0,
            ms_per_second=speed,
            num_trained=0,
            training_data="",
            estimates=estimates,
            threshold=0.5,
            p_miss=0.1,
            num_others=3000,
        )

    return make


def test_the_lowest_eer_is_recommended_and_of_equal_ones_the_fastest(make_candidate):
    slow = make_candidate("slow", 0.5, speed=9.0)
    fast = make_candidate("fast", 0.5, speed=3.0)
    bad = make_candidate("bad", 1.5, gsm=0.2)
    models = [bad, slow, fast]
    comparisons = choosing.compare_all(models)
    assert choosing.recommend(models) is fast
    assert [tie.other(fast) for tie in choosing.tied_with(fast, comparisons)] == [slow]

    lines = choosing.describe(models, comparisons, far=0.01)
    assert lines[0].startswith("recommended: fast, which has the lowest EER")
    assert lines[1].startswith("better than: bad (p")
    assert lines[2].startswith("not significantly different from slow with 20 speakers")
    assert "may not decide" in lines[2]
    assert lines[-1].startswith("but with codec of the test side gsm: bad is better")
    values = choosing.json_values(models, comparisons)
    assert values["recommended"] == "fast"
    assert values["not_told_apart"] == ["slow"]
    betters = [row["better"] for row in values["comparisons"]]
    # Of each condition: bad and slow, bad and fast, slow and fast.
    assert betters == ["slow", "fast", None, "bad", "bad", None]


def test_a_faster_model_that_may_be_as_good_is_named(make_candidate):
    best = make_candidate("best", 0.7, speed=9.0)
    fast = make_candidate("fast", 0.75, speed=3.0)
    trained = replace(fast, num_trained=2)
    lines = choosing.describe(
        [best, trained], choosing.compare_all([best, trained]), far=0.001
    )
    text = "\n".join(lines)
    assert best.eer < fast.eer
    assert "the fastest of these: fast, 3.0 instead of 9.0 ms" in text
    assert "more are needed to decide" in text
    assert "fast: was trained on 2 speakers of these" in text
    assert "a false-accept rate of 0.1 % is 3 pairs of 3,000" in text


def test_the_number_of_speakers_by_hand():
    # (1.96 + 0.8416) x 0.01 / 0.02 = 1.4008, whose square is 1.962: 20 speakers become 40.
    result = Difference(-0.02, [-0.04, 0.0], 0.06, 0.01)
    assert choosing.more_speakers(result, 20, num_pairs=1) == 20
    # Three pairs: Phi^-1(1 - 0.05 / 6) = 2.394; 1.6178 ** 2 x 20 = 52.3.
    assert choosing.more_speakers(result, 20, num_pairs=3) == 33
    decided = Difference(-0.2, [-0.3, -0.1], 0.04, 0.01)
    assert choosing.more_speakers(decided, 20, num_pairs=1) == 1
    for difference, error in ((0.0, 0.01), (0.02, 0.0), (1e-6, 0.01)):
        result = Difference(difference, [-1.0, 1.0], 0.9, error)
        assert choosing.more_speakers(result, 20, num_pairs=1) is None


def test_power_is_what_is_promised():
    """Of differences that are drawn with the promised number of speakers, 80 % are significant."""
    result = Difference(0.01, [-0.01, 0.03], 0.3, 0.01)
    total = 25 + choosing.more_speakers(result, 25, num_pairs=1)
    error = 0.01 * math.sqrt(25 / total)
    drawn = np.random.default_rng(0).normal(0.01, error, size=20_000)
    assert np.mean(np.abs(drawn) > 1.96 * error) == pytest.approx(0.8, abs=0.01)


def test_no_threshold_where_no_score_has_so_few_false_alarms():
    is_target = np.array([True, True, False, False])
    scores = np.array([0.9, 0.4, 0.5, 0.1])
    assert choosing.find_threshold(scores, is_target, far=0.0) == (0.9, 0.5)
    assert choosing.find_threshold(scores[::-1], is_target, far=0.0) == (None, None)
