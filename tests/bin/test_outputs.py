"""Outputs that cannot be written, and missing inputs, are found before the work."""

import importlib

import pytest
from refusals import refused, refuses

from speakerlab.bin.command import plain_text

# Command, its words, and what of the output is named; {file} is a file where a folder is needed.
COMMANDS = [
    ("embed", "a.wav --model {exp} --out {file}/embs", "{file}/embs.json"),
    ("export", "{exp} --out {file}/a.onnx", "{file}/a.onnx"),
    ("import_", "a.bin --out {file}/model", "{file}/model"),
    ("average", "{exp} --out {file}/model", "{file}/model"),
    ("enroll", "ann a.wav --model {exp} --speakers {file}/speakers", "{file}/speakers"),
    ("fuse", "--trials a --scores b c --out {file}/fused", "{file}/fused"),
    (
        "calibrate",
        "--model {exp} --data {data}/test --out {file}/exp",
        "{file}/exp/model/calibration.json",
    ),
    ("extract", "--exp {exp} --data {data}/test", "{exp}/embeddings/test/trained.json"),
    ("score", "--exp {exp} --trials {data}/test/trials", "{exp}/scores/list.txt"),
]
NAMES = [name for name, _, _ in COMMANDS]


@pytest.mark.parametrize(("name", "arguments", "subject"), COMMANDS, ids=NAMES)
def test_unwritable_output_is_found_first(
    name, arguments, subject, trained, data, tmp_path
):
    file = tmp_path / "file"
    exp = tmp_path / "exp"
    exp.mkdir()
    for path in ("model", "config.yaml", "checkpoints"):
        (exp / path).symlink_to(trained / path)
    # Files where folders are needed.
    for path in (file, exp / "embeddings", exp / "scores"):
        path.touch()
    paths = {"file": file, "exp": exp, "data": data}
    main = importlib.import_module(f"speakerlab.bin.{name}").main
    with refuses(subject.format(**paths)):
        main([word.format(**paths) for word in arguments.split()])
    assert file.read_bytes() == b""


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("embed", "--list {gone} --model {exp} --out {out}"),
        ("verify", "--trials {gone} --model {exp}"),
        ("extract", "--exp {exp} --data {gone}"),
    ],
)
def test_missing_path_is_called_missing(name, arguments, trained, tmp_path):
    gone = tmp_path / "gone"
    paths = {"gone": gone, "exp": trained, "out": tmp_path / "out"}
    main = importlib.import_module(f"speakerlab.bin.{name}").main
    with pytest.raises(FileNotFoundError) as caught:
        main([word.format(**paths) for word in arguments.split()])
    assert refused(plain_text(caught.value), str(gone), "does not exist")


def test_control_characters_of_a_message_are_escaped():
    error = ValueError("a\x1b[2J\u202eb.wav:\tgone\nc: é")
    assert plain_text(error) == "a\\x1b[2J\\u202eb.wav:\tgone\nc: é"


def test_error_of_the_system_is_one_line(tmp_path, run):
    path = tmp_path / "file/train"
    path.parent.touch()
    finished = run("-m", "speakerlab", "pack", path, code=1)
    assert finished.stderr.count("\n") == 1
    assert str(path) in finished.stderr
