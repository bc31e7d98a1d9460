"""`speakerlab enroll` and `identify`: from one process to another by the speakers' file."""

import shutil

from models_on_disk import CALIBRATION
from refusals import refused, refuses
from voices import RATE, make_wave

import speakerlab
from speakerlab.bin import enroll, identify
from speakerlab.data import audio
from speakerlab.inference.speaker_model import SpeakerModel


def printed_lines(capsys) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_an_enrolled_speaker_is_identified(tmp_path, make_exp, capsys, caplog):
    first = str(tmp_path / "first.wav")
    second = str(tmp_path / "second.wav")
    third = str(tmp_path / "third.wav")
    for voice, path in enumerate((first, second, third)):
        wave_S = make_wave(voice, 0, 1.0)
        audio.write(path, wave_S, RATE)
    exp = make_exp("exp", calibration=CALIBRATION)
    team = tmp_path / "team.safetensors"
    model = ["--model", str(exp), "--speakers", str(team), "--device", "cpu"]
    with refuses(str(team), "no such file", error=FileNotFoundError):
        identify.main([third, *model])

    folder = tmp_path / "of ann"
    folder.mkdir()
    for path in (first, second):
        shutil.copy(path, folder)
    with caplog.at_level("INFO"):
        enroll.main(["ann", str(folder), *model])
        enroll.main(["bob smith", third, *model])
        enroll.main(["ann", first, *model])
    assert caplog.messages[-3:] == [
        f"{team}: enrolled ann, recordings: 2; speakers in the file: 1",
        f"{team}: enrolled bob smith, recordings: 1; speakers in the file: 2",
        f"{team}: replaced ann, recordings: 1; speakers in the file: 2",
    ]

    identify.main([third, *model])
    best, other, speech, decision = printed_lines(capsys)
    assert best == "1.000000  bob smith"
    assert other.endswith("  ann")
    assert speech == "speech: 1.00 s"
    assert decision == "decision: bob smith (threshold 0.500000)"

    # With few false alarms, the nearest speaker is too far away.
    identify.main([second, *model, "--far", "0.01", "--top", "1"])
    best, _, decision = printed_lines(capsys)
    score = float(best.split()[0])
    assert score < 0.9999
    assert decision == "decision: unknown speaker (threshold 0.999900)"

    # Without a calibration there is no decision.
    (exp / "model/calibration.json").unlink()
    identify.main([third, *model])
    *_, decision = printed_lines(capsys)
    assert decision.startswith("decision: none")


def test_a_file_that_is_given_twice_counts_once(tmp_path, make_exp, caplog):
    folder = tmp_path / "of ann"
    folder.mkdir()
    first = folder / "first.wav"
    second = folder / "second.wav"
    for voice, path in enumerate((first, second)):
        audio.write(path, make_wave(voice, 0, 1.0), RATE)
    link = tmp_path / "link.wav"
    link.symlink_to(first)
    exp = make_exp("exp")
    team = tmp_path / "team.safetensors"
    options = ["--model", str(exp), "--speakers", str(team), "--device", "cpu"]
    with caplog.at_level("INFO"):
        enroll.main(["ann", str(first), str(first), str(link), *options])
        enroll.main(["bob", str(first), *options])
        enroll.main(["cid", str(folder), str(first), *options])
    repeats = [text for text in caplog.messages if "used once" in text]
    assert repeats == [
        f"{first}: was given already, as {first}; used once",
        f"{link}: was given already, as {first}; used once",
        f"{first}: was given already, as {first}; used once",
    ]
    counts = [text for text in caplog.messages if "recordings: " in text]
    assert "recordings: 1;" in counts[0]
    assert "recordings: 2;" in counts[2]


def test_every_recording_that_cannot_be_used_is_named(tmp_path, make_exp):
    exp = make_exp("exp")
    team = tmp_path / "team.safetensors"
    options = ["--model", str(exp), "--speakers", str(team), "--device", "cpu"]
    good = tmp_path / "good.wav"
    audio.write(good, make_wave(0, 0, 1.0), RATE)
    broken = tmp_path / "broken.wav"
    broken.write_text("no sound")
    missing = tmp_path / "missing.wav"
    with refuses(str(missing), error=FileNotFoundError):
        enroll.main(["ann", str(good), str(missing), *options])
    with refuses(str(broken)) as caught:
        enroll.main(["ann", str(broken), str(good), str(missing), *options])
    assert refused(str(caught.value), str(missing))
    # Two lines would be two speakers in the output of `identify`.
    with refuses("enrol", r"'ann\nbob'"):
        enroll.main(["ann\nbob", str(good), *options])
    assert not team.exists()


def test_changes_of_other_commands_meanwhile_are_kept(tmp_path, make_exp, monkeypatch):
    """Another command replaces ann and adds bob while this one embeds the recordings of cid."""
    waves = {name: make_wave(voice, 0, 1.0) for voice, name in enumerate("abc")}
    for name, wave_S in waves.items():
        audio.write(tmp_path / f"{name}.wav", wave_S, RATE)
    exp = make_exp("exp")
    team = tmp_path / "team.safetensors"
    options = ["--model", str(exp), "--speakers", str(team), "--device", "cpu"]
    enroll.main(["ann", str(tmp_path / "a.wav"), *options])

    embed = SpeakerModel.enroll

    def enroll_and_wait(model, name, sources, **options):
        embed(model, name, sources, **options)
        other = speakerlab.load(exp, device="cpu")
        embed(other, "ann", waves["b"])
        embed(other, "bob", waves["b"])
        other.save_speakers(team, add=["ann", "bob"])

    monkeypatch.setattr(SpeakerModel, "enroll", enroll_and_wait)
    enroll.main(["cid", str(tmp_path / "c.wav"), *options])

    model = speakerlab.load(exp, device="cpu")
    model.load_speakers(team)
    assert list(model.speakers) == ["ann", "bob", "cid"]
    assert (model.speakers["ann"] == model.speakers["bob"]).all()

    # A service may keep its own speakers in memory and add one of them to the file.
    model.speakers = {"dan": model.speakers["cid"]}
    model.save_speakers(team, add="dan")
    assert list(model.speakers) == ["dan"]
    with refuses(str(team), "'eve' is not enrolled"):
        model.save_speakers(team, add=["eve"])
    model.load_speakers(team)
    assert list(model.speakers) == ["ann", "bob", "cid", "dan"]
