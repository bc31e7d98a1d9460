"""`speakerlab enroll` and `identify`: from one process to another by the speakers' file."""

from pathlib import Path

import pytest
from models_on_disk import CALIBRATION, publish_small
from voices import RATE, make_wave

from speakerlab.bin import enroll, identify
from speakerlab.data import audio


@pytest.fixture
def wavs(tmp_path: Path) -> list[str]:
    for speaker in range(3):
        audio.write(tmp_path / f"{speaker}.wav", make_wave(speaker, 0, 1.0), RATE)
    return [str(tmp_path / f"{speaker}.wav") for speaker in range(3)]


@pytest.mark.parametrize("calibrated", [True, False])
def test_a_speaker_is_remembered_and_found(
    tmp_path, make_config, make_embedder, wavs, capsys, caplog, calibrated
):
    calibration = CALIBRATION if calibrated else None
    exp = publish_small(tmp_path / "exp", make_config(), make_embedder(), calibration)
    team = tmp_path / "team.safetensors"
    model = ["--model", str(exp), "--speakers", str(team), "--device", "cpu"]
    with caplog.at_level("INFO"):
        enroll.main(["ann", wavs[0], wavs[1], *model])
        enroll.main(["bob smith", wavs[2], *model])
        enroll.main(["ann", wavs[0], *model])
    assert [record.getMessage() for record in caplog.records][-3:] == [
        f"{team}: enrolled ann, recordings: 2; speakers in the file: 1",
        f"{team}: enrolled bob smith, recordings: 1; speakers in the file: 2",
        f"{team}: replaced ann, recordings: 1; speakers in the file: 2",
    ]
    identify.main([wavs[2], *model])
    first, second, decision = capsys.readouterr().out.splitlines()
    assert first == "1.000000  bob smith"
    assert second.endswith("  ann")
    if calibrated:
        assert decision == "decision: bob smith (threshold 0.500000)"
        identify.main([wavs[1], *model, "--far", "0.01", "--top", "1"])
        best, decision = capsys.readouterr().out.splitlines()
        assert float(best.split()[0]) < 0.9999
        assert decision == "decision: unknown speaker (threshold 0.999900)"
    else:
        assert decision == "decision: none (the model has no calibration)"


def test_without_speakers_there_is_one_line(tmp_path, make_config, make_embedder, wavs, run):
    exp = publish_small(tmp_path / "exp", make_config(), make_embedder())
    words = ["-m", "speakerlab", "identify", wavs[0], "--model", exp]
    done = run(*words, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "speakers.safetensors: no such file; enrol speakers first\n"
