"""The command `choose`: its table and files, what it keeps, leaves out and refuses."""

import json
import shutil
from argparse import Namespace

import choose_claims
import numpy as np
import pytest
from refusals import refuses
from voices import RATE, make_wave, write_voices

from speakerlab.bin import choose
from speakerlab.data import audio, tables
from speakerlab.inference import workers

QUICK = ["--durations", "0.5", "--codecs", "gsm", "--snr", "10"]
NO_CONDITIONS = ["--durations", "full", "--codecs", "none", "--snr", "none"]
EIGHT = "frontend={sample_rate: 8000}"


@pytest.fixture(autouse=True)
def without_long_timing(monkeypatch):
    monkeypatch.setattr(choose, "SECONDS_PER_TIMING", 0.01)


@pytest.fixture
def voices(tmp_path):
    return write_voices(tmp_path / "voices", speakers=range(6))


@pytest.fixture
def ask(tmp_path, capsys):
    """ask(data, models, options) -> what is printed, and the results."""
    out = tmp_path / "out"

    def main(data, models, *options, code=0):
        names = [str(model) for model in models]
        places = ["--data", str(data), "--out", str(out)]
        arguments = [*places, "--models", *names, *options]
        if code:
            with pytest.raises(SystemExit) as request:
                choose.main(arguments)
            assert request.value.code == code
        else:
            choose.main(arguments)
        return capsys.readouterr().out, json.loads((out / "choice.json").read_text())

    return main


def write_folders(folder):
    """A folder for each of six speakers, of another rate; a copy, and a broken file."""
    for speaker in range(6):
        place = folder / f"spk{speaker}"
        place.mkdir(parents=True)
        for take in range(3):
            wave_S = make_wave(speaker, take, 1.0, rate=44100)
            audio.write(place / f"{take}.wav", wave_S, 44100)
    shutil.copy(folder / "spk1/0.wav", folder / "spk1/copy.wav")
    shutil.copy(folder / "spk2/0.wav", folder / "spk3/stolen.wav")
    (folder / "spk0/broken.wav").write_bytes(b"RIFF but no audio")
    return folder


def test_models_are_compared_in_each_condition(make_exp, voices, ask):
    models = [make_exp("a"), make_exp("b", "seed=5")]
    text, results = ask(voices, models, *QUICK)
    header = text.splitlines()[0]
    for column in ("EER %", "EER % 0.5 s", "EER % gsm", "EER % 10 dB", "ms/s", "MB"):
        assert column in header
    assert "recommended: " in text
    rows = results["models"]
    assert [row["model"] for row in rows] == [str(model) for model in models]
    for row in rows:
        values = [part["value"] for part in row["conditions"]]
        assert values == ["as recorded", "0.5 s", "gsm", "10 dB"]
        for part in row["conditions"]:
            low, high = part["eer_ci95"]
            assert 0 <= low <= part["eer"] <= high <= 1
        assert row["ms_per_second"] > 0
    eers = {row["model"]: row["conditions"][0]["eer"] for row in rows}
    assert results["recommended"] == min(eers, key=lambda name: eers[name])
    assert len(results["comparisons"]) == 4


def test_the_check_of_the_statements_embeds_as_the_command_does(
    make_exp, voices, ask, tmp_path
):
    model = make_exp("a")
    _, results = ask(voices, [model], *NO_CONDITIONS)
    options = Namespace(pool=voices, models=[model], noise=[0.5], out=tmp_path / "pool")
    pool = choose_claims.embed_pool(options)
    name = str(model)
    assert list(pool.truth) == [name, f"{name} + noise 0.5"]
    assert pool.truth[name] == results["models"][0]["conditions"][0]["eer"]


def test_an_interrupted_call_keeps_its_embeddings(
    make_exp, voices, ask, tmp_path, monkeypatch
):
    models = [make_exp("a"), make_exp("b", "seed=5")]
    calls = []
    embed_chunks = workers.embed_chunks

    def stop_in_third(table, *arguments, **options):
        calls.append(table.stem)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return embed_chunks(table, *arguments, **options)

    monkeypatch.setattr(workers, "embed_chunks", stop_in_third)
    with pytest.raises(KeyboardInterrupt):
        ask(voices, models, *NO_CONDITIONS[2:], "--durations", "0.5")
    assert not (tmp_path / "out/choice.json").exists()
    _, results = ask(voices, models, *NO_CONDITIONS[2:], "--durations", "0.5")
    # Four tables: the first two are kept, and the third is computed again.
    assert len(calls) == 5
    assert calls[2] == calls[3]

    _, again = ask(voices, models, *NO_CONDITIONS[2:], "--durations", "0.5")
    assert len(calls) == 5
    eers = [
        [row["conditions"] for row in found["models"]] for found in (results, again)
    ]
    assert eers[0] == eers[1]
    # Cut utterances are other utterances.
    ask(voices, models, *NO_CONDITIONS, "--seconds", "0.8")
    assert len(calls) == 7


def test_a_folder_of_speakers_with_broken_and_copied_files(make_exp, tmp_path, ask):
    folder = write_folders(tmp_path / "speakers")
    before = sorted(folder.rglob("*"))
    _, results = ask(folder, [make_exp("a")], *NO_CONDITIONS)
    assert results["models"][0]["conditions"][0]["num_speakers"] == 6
    rejected = tables.read_rejected(tmp_path / "out")
    text = "\n".join(reason for _, reason in rejected.values())
    assert len(rejected) == 4
    assert text.count("is a copy of spk1-") == 1
    assert text.count("same recording as that of another speaker") == 2
    assert "broken.wav" in text
    assert sorted(folder.rglob("*")) == before

    (folder / "loose.wav").write_bytes(b"")
    with refuses(folder / "loose.wav", "is not in the folder of a speaker"):
        ask(folder, [make_exp("a")], *NO_CONDITIONS)


def test_a_model_of_another_rate_gets_converted_recordings(make_exp, voices, ask):
    models = [make_exp("a"), make_exp("low", EIGHT)]
    _, results = ask(voices, models, *QUICK)
    assert [row["sample_rate"] for row in results["models"]] == [RATE, 8000]
    assert results["failed"] == {}


def test_models_that_fail_are_left_out(make_exp, voices, ask, tmp_path):
    good = make_exp("good")
    cut = make_exp("cut")
    weights = cut / "model/embedder.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    missing = tmp_path / "missing"
    models = [missing, cut, good, good / "model"]
    text, results = ask(voices, models, *NO_CONDITIONS, code=1)
    assert [row["model"] for row in results["models"]] == [str(good)]
    assert set(results["failed"]) == {str(missing), str(cut)}
    assert f"left out: {missing}: does not exist" in text
    with pytest.raises(ValueError, match="none of them could be opened"):
        ask(voices, [missing], *NO_CONDITIONS)
    with pytest.raises(ValueError, match="none of them could be measured"):
        ask(voices, [cut], *NO_CONDITIONS)


def test_equal_models_are_not_told_apart(make_exp, voices, ask, tmp_path):
    first = make_exp("first")
    shutil.copytree(first, tmp_path / "second")
    _, results = ask(voices, [first, tmp_path / "second"], *NO_CONDITIONS)
    (comparison,) = results["comparisons"]
    assert comparison["eer_difference"] == 0
    assert comparison["better"] is None
    assert len(results["not_told_apart"]) == 1


def test_limits_are_logged(make_exp, voices, ask, caplog):
    exp = make_exp("a")
    limits = ["--utterances", "8", "--per-speaker", "2"]
    _, results = ask(voices, [exp], *NO_CONDITIONS, *limits)
    assert "8 utterances of 18, of 4 of 6 speakers, are used" in caplog.text
    assert results["models"][0]["conditions"][0]["num_speakers"] == 4
    assert results["models"][0]["conditions"][0]["eer_ci95"] is None


def test_noise_of_a_directory(make_exp, voices, ask, tmp_path):
    rng = np.random.default_rng(0)
    noise_S = 3000 * rng.standard_normal(RATE)
    path = tmp_path / "noise.wav"
    audio.write(path, noise_S.astype(np.int16), RATE)
    folder = tmp_path / "noise"
    tables.write_data_dir(folder, wavs={"n": path})
    options = [*NO_CONDITIONS[:-1], "0", "--noise", str(folder)]
    _, results = ask(voices, [make_exp("a")], *options)
    assert results["models"][0]["conditions"][1]["value"] == "0 dB"
    # Noise of the rate of the recordings is converted with them.
    _, of_both = ask(voices, [make_exp("b"), make_exp("low", EIGHT)], *options)
    assert of_both["failed"] == {}


@pytest.mark.parametrize("fault", ["missing", "no recordings", "rate", "silence"])
def test_a_fault_of_the_noise_is_no_fault_of_a_model(
    make_exp, voices, ask, tmp_path, monkeypatch, fault
):
    folder = tmp_path / "noise"
    subject = "--noise"
    if fault == "no recordings":
        folder.mkdir()
    elif fault in ("rate", "silence"):
        rate = 8000 if fault == "rate" else RATE
        path = tmp_path / "noise.wav"
        audio.write(path, np.zeros(RATE, np.int16), rate)
        tables.write_data_dir(folder, wavs={"n": path})
        if fault == "rate":
            subject = f"{folder}/wav.scp"
    measured = []
    monkeypatch.setattr(
        choose, "measure_model", lambda _, model, *__: measured.append(model)
    )
    with refuses(subject, ""):
        ask(voices, [make_exp("a")], *NO_CONDITIONS[:-1], "0", "--noise", str(folder))
    assert measured == []


def test_speakers_of_the_training_are_named_or_unknown(make_exp, voices, ask, caplog):
    of_these = make_exp("a")
    (of_these / "model/speakers.txt").write_text("spk1\nspk4\nanother\n")
    unknown = make_exp("b", "seed=5")
    (unknown / "model/speakers.txt").unlink(missing_ok=True)
    card = unknown / "model/card.json"
    values = json.loads(card.read_text())
    values["source"] = {"training_data": "VoxCeleb2 and friends"}
    card.write_text(json.dumps(values))
    text, results = ask(voices, [of_these, unknown], *NO_CONDITIONS)
    assert f"{of_these}: was trained on 2 speakers of these" in text
    assert f"{unknown}: the speakers of its training are unknown" in text
    assert "(training data: VoxCeleb2 and friends" in text
    assert f"{unknown}: training speakers unknown" in caplog.text
    assert f"{of_these}: training speakers unknown" not in caplog.text
    numbers = [row["trained_on_speakers"] for row in results["models"]]
    assert numbers == [2, None]


def test_a_recording_that_is_gone_does_not_end_it(make_exp, voices, ask):
    (voices.parent / "wav/spk0-0.wav").unlink()
    text, results = ask(voices, [make_exp("a")], *NO_CONDITIONS)
    assert results["models"][0]["conditions"][0]["num_speakers"] == 6
    assert "recommended" in text


def test_refusals(make_exp, tmp_path, voices, ask):
    exp = make_exp("a")
    one = write_voices(tmp_path / "one", speakers=[0], check=False)
    tables.write_table(one / "utt2dur", {f"spk0-{take}": "1" for take in range(3)})
    with refuses(one, "has 1 speaker"):
        ask(one, [exp], *NO_CONDITIONS)
    single = write_voices(tmp_path / "single", seconds=(1.0,))
    with refuses(single, "no speaker has two recordings"):
        ask(single, [exp], *NO_CONDITIONS)
    missing = tmp_path / "missing"
    with refuses(missing, "does not exist", error=FileNotFoundError):
        ask(missing, [exp], *NO_CONDITIONS)
    empty = tmp_path / "empty"
    empty.mkdir()
    with refuses(empty, "has neither wav.scp nor recordings"):
        ask(empty, [exp], *NO_CONDITIONS)
    with refuses("--snr", "loud"):
        ask(voices, [exp], "--snr", "loud")
    with refuses("--utterances", "20000"):
        ask(voices, [exp], "--utterances", "20000")

    ask(voices, [exp], *NO_CONDITIONS)
    other = write_voices(tmp_path / "other", speakers=range(6))
    with refuses("--out", voices):
        ask(other, [exp], *NO_CONDITIONS)
    (other / "utt2spk").unlink()
    (tmp_path / "out/choice.json").unlink()
    with refuses(other / "utt2spk", "needs speaker labels", error=FileNotFoundError):
        ask(other, [exp], *NO_CONDITIONS)
    unchecked = write_voices(tmp_path / "unchecked", check=False)
    with refuses(unchecked, "has not been checked", error=FileNotFoundError):
        ask(unchecked, [exp], *NO_CONDITIONS)
