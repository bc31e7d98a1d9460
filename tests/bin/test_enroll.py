"""`speakerlab enroll` and `identify`: from one process to another by the speakers' file."""

from models_on_disk import CALIBRATION
from refusals import refuses
from voices import RATE, make_wave

from speakerlab.bin import enroll, identify
from speakerlab.data import audio


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

    with caplog.at_level("INFO"):
        enroll.main(["ann", first, second, *model])
        enroll.main(["bob smith", third, *model])
        enroll.main(["ann", first, *model])
    assert caplog.messages[-3:] == [
        f"{team}: enrolled ann, recordings: 2; speakers in the file: 1",
        f"{team}: enrolled bob smith, recordings: 1; speakers in the file: 2",
        f"{team}: replaced ann, recordings: 1; speakers in the file: 2",
    ]

    identify.main([third, *model])
    best, other, decision = printed_lines(capsys)
    assert best == "1.000000  bob smith"
    assert other.endswith("  ann")
    assert decision == "decision: bob smith (threshold 0.500000)"

    # With few false alarms, the nearest speaker is too far away.
    identify.main([second, *model, "--far", "0.01", "--top", "1"])
    best, decision = printed_lines(capsys)
    score = float(best.split()[0])
    assert score < 0.9999
    assert decision == "decision: unknown speaker (threshold 0.999900)"

    # Without a calibration there is no decision.
    (exp / "model/calibration.json").unlink()
    identify.main([third, *model])
    *_, decision = printed_lines(capsys)
    assert decision.startswith("decision: none")
