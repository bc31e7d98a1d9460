"""Options of all commands: what the parser refuses, and outputs that nobody reads."""

import io
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from refusals import refused
from tiny import ROOT
from voices import RATE, make_wave

from speakerlab.bin import check, embed, extract, plan, train
from speakerlab.bin.command import collect_warnings, json_line, parser
from speakerlab.data import audio


@pytest.mark.parametrize(
    ("parse", "arguments", "subject", "values"),
    [
        (
            train.parse,
            ["--exp", "a", "--confg", "b"],
            "speakerlab train",
            ["--confg", "--config?"],
        ),
        (train.parse, ["--otp=1"], "speakerlab train", ["--otp"]),
        (
            plan.parse,
            ["--hardware", "cpu"],
            "speakerlab plan",
            ["--hardware; see --help"],
        ),
        # No option of `plan` is like it.
        (plan.parse, ["--json"], "speakerlab plan", ["--json; see --help"]),
        (train.parse, ["--set", "a=--b"], "speakerlab train", ["--exp, --config"]),
        (
            extract.parse,
            ["--job", "3/2"],
            "speakerlab extract: --job",
            ["3/2", "I from 1 to N"],
        ),
        (
            extract.parse,
            ["--per-speaker", "0"],
            "speakerlab extract: --per-speaker",
            [0, 1],
        ),
    ],
)
def test_a_misspelt_option_is_named_before_a_missing_one(
    parse, arguments, subject, values, capsys
):
    with pytest.raises(SystemExit):
        parse(arguments)
    text = capsys.readouterr().err
    assert refused(text, subject, *values), text
    assert text.count("\n") == 1, text


@pytest.fixture
def closed_pipe() -> Iterator[int]:
    """The end for writing of a pipe whose reader is gone, as after `| true`."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


def run_into(output: object, *arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "speakerlab", *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, stdout=output, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    "arguments",
    ["--help", "--version", "embed --help", "import --list", "der {rttm} {rttm}"],
)
def test_a_closed_pipe_is_silent(arguments, closed_pipe, tmp_path):
    rttm = tmp_path / "a.rttm"
    rttm.write_text("SPEAKER a 1 0.0 2.0 <NA> <NA> ann <NA> <NA>\n")
    finished = run_into(closed_pipe, *arguments.format(rttm=rttm).split())
    assert finished.stderr == ""
    # As a program that dies of SIGPIPE; argparse ignores errors of its output.
    assert finished.returncode in (141, 0 if arguments == "embed --help" else 141)


def test_the_help_of_a_recipe_is_silent_in_a_closed_pipe(closed_pipe):
    command = ["bash", "egs/mini/run.sh", "--help"]
    finished = subprocess.run(
        command, cwd=ROOT, stdout=closed_pipe, stderr=subprocess.PIPE, text=True
    )
    assert "unknown option" not in finished.stderr
    assert finished.returncode != 0


@pytest.mark.slow
def test_a_reader_that_leaves_early_ends_the_command(make_exp, environment, tmp_path):
    wav = tmp_path / "a.wav"
    audio.write(wav, make_wave(0, 0, 1.0), RATE)
    # More than a pipe holds, so that the command has to wait for the reader.
    pairs = tmp_path / "pairs"
    pairs.write_text(f"{wav} {wav}\n" * 5000)
    options = ["--trials", str(pairs), "--model", str(make_exp("exp"))]
    command = [sys.executable, "-m", "speakerlab", "verify", *options]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout
        line = process.stdout.readline()
        process.stdout.close()
        assert process.stderr
        errors = process.stderr.read()
    assert line.startswith(f"{wav} {wav} 1.0".encode())
    assert process.returncode == 141
    assert errors == b""


def test_a_full_disk_and_a_closed_output_are_no_traceback():
    with Path("/dev/full").open("w") as full:
        finished = run_into(full, "--version")
    assert finished.returncode == 1
    assert finished.stderr.count("\n") == 1
    assert "No space left" in finished.stderr
    closed = f"{sys.executable} -m speakerlab --version >&-"
    finished = subprocess.run(
        closed, shell=True, cwd=ROOT, capture_output=True, text=True
    )
    assert finished.stderr == ""
    assert finished.returncode == 0


@pytest.mark.parametrize(
    ("text", "each", "expected"),
    [("1", "", 1), ("12", "", 12), ("mix", "", "mix"), ("each", "rows", "each")],
)
def test_a_channel_is_a_number_from_1_on_or_a_word(text, each, expected):
    options = parser("verify", "")
    options.add_channel(each)
    assert options.parse_args(["--channel", text]).channel == expected
    assert options.parse_args([]).channel is None


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "left", "each", ""])
def test_other_channels_are_refused(text, capsys):
    options = parser("verify", "")
    options.add_channel()
    with pytest.raises(SystemExit):
        options.parse_args([f"--channel={text}"])
    assert refused(capsys.readouterr().err, "speakerlab verify: --channel", text)


@pytest.mark.parametrize("text", ["nan", "-1", "1.01", "5", "half"])
def test_a_share_is_from_0_to_1(text, capsys):
    with pytest.raises(SystemExit):
        check.main(["data", f"--allow-rejected={text}"])
    assert refused(
        capsys.readouterr().err, "speakerlab check: --allow-rejected", "0 to 1", text
    )


def test_a_file_that_looks_like_an_option_is_written_with_its_folder(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-dash.wav").touch()
    with pytest.raises(SystemExit):
        embed.parse(["-dash.wav", "--model", "m", "--out", "e"])
    assert refused(capsys.readouterr().err, "speakerlab embed", "./-dash.wav")


@pytest.mark.parametrize(
    ("encoding", "name"),
    [
        ("utf-8", "张三 😀"),
        ("UTF8", "张三 😀"),
        # Python's own escapes, such as \xe9, are not those of JSON.
        ("ascii", r"\u5f20\u4e09 \ud83d\ude00"),
        ("latin-1", r"\u5f20\u4e09 \ud83d\ude00"),
    ],
)
def test_json_is_escaped_only_for_an_output_that_needs_it(monkeypatch, encoding, name):
    output = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", output)
    assert json_line({"name": "张三 😀"}) == f'{{"name": "{name}"}}\n'


def test_only_warnings_of_this_thread_are_collected():
    log = logging.getLogger("speakerlab.test")
    with collect_warnings() as warnings:
        log.warning("%s: faint", "a.wav")
        log.info("b.wav: read")
        thread = threading.Thread(target=log.warning, args=["c.wav: faint"])
        thread.start()
        thread.join()
    log.warning("d.wav: faint")
    assert warnings == ["a.wav: faint"]
