"""`speakerlab enroll` and `identify`: from one process to another by the speakers' file."""

from models_on_disk import CALIBRATION
from refusals import refuses
from voices import RATE, make_wave

from speakerlab.bin import enroll, identify
from speakerlab.data import audio


def test_an_enrolled_speaker_is_identified(tmp_path, make_exp, capsys, caplog):
    wavs = [str(tmp_path / f"{speaker}.wav") for speaker in range(3)]
    for speaker, path in enumerate(wavs):
        audio.write(path, make_wave(speaker, 0, 1.0), RATE)
    exp = make_exp("exp", calibration=CALIBRATION)
    team = tmp_path / "team.safetensors"
    model = ["--model", str(exp), "--speakers", str(team), "--device", "cpu"]
    with refuses(str(team), "no such file", error=FileNotFoundError):
        identify.main([wavs[2], *model])
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
    assert decision == "decision: bob smith (threshold 0.500000)"
    identify.main([wavs[1], *model, "--far", "0.01", "--top", "1"])
    best, decision = capsys.readouterr().out.splitlines()
    assert float(best.split()[0]) < 0.9999
    assert decision == "decision: unknown speaker (threshold 0.999900)"
    (exp / "model/calibration.json").unlink()
    identify.main([wavs[2], *model])
    assert capsys.readouterr().out.splitlines()[-1].startswith("decision: none")
