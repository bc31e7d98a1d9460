"""Folders as users have them: of others, linked, oddly named, or with very many files."""

import json
import os
import resource
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import BARE, CONFIG, ROOT, TINY, card, copy_data, names_in, read_json, slow
from voices import RATE, make_wave, write_voices

from egs.own.prepare import main as prepare_own
from speakerlab.checkpoints.published import load_published
from speakerlab.data import audio
from speakerlab.data.check import check_data_dirs
from speakerlab.data.manifest import read_manifest
from speakerlab.data.pack import pack_data_dir
from speakerlab.data.shards import Layout
from speakerlab.data.tables import read_rejected, read_table

PCM = Layout.of_waves("pcm", sample_rate=RATE)
# A user who is not in /etc/passwd.
STRANGER = ["unshare", "--user", "--map-user=12345", "--map-group=12345"]
# Mounts a full disk at TMPDIR, and then runs its arguments.
FULL = (
    'mount -t tmpfs -o size=8k none "$TMPDIR" && cat /dev/zero >"$TMPDIR/fill"; exec'
    ' "$@"'
)
WITH_FULL_TMPDIR = ["unshare", "--user", "--map-root-user", "--mount"]
WITH_FULL_TMPDIR += ["bash", "-c", FULL, "bash"]
ODD = "a b \"c\" 'd' #e: ü [f]{g}*? $(touch h) \\n -i %s"
# Calls commands in one process; prints the error of each in one line.
REFUSALS = """
import importlib, json, sys
from speakerlab.bin.command import plain_text
for name, *words in json.loads(sys.argv[1]):
    try:
        importlib.import_module(f"speakerlab.bin.{name}").main(words)
        print("accepted")
    except (ValueError, OSError) as error:
        print(plain_text(error))
"""


def run_as(prefix: list[str], *arguments: object, **variables: str):
    """Run `python *words` behind a prefix, with few variables and no user name."""
    attempt = subprocess.run([*STRANGER, "true"], capture_output=True)
    if attempt.returncode != 0:
        pytest.skip("this machine does not let tests be another user")
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    command = [*prefix, sys.executable]
    command += [str(argument) for argument in arguments]
    done = subprocess.run(
        command,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def short(data: Path) -> list[str]:
    """Settings of a training of one epoch without noise and rooms."""
    settings = [f"data.dir={data}", *TINY, "training.num_epochs=1", *BARE]
    return ["--config", CONFIG, "--set", *settings]


NOT_WRITABLE = [
    "no home",
    slow("home"),
    slow("TMPDIR"),
]


@pytest.mark.parametrize("place", NOT_WRITABLE)
def test_a_user_without_a_writable_place_trains(data, tmp_path, place):
    """The data are of another user; only the experiment can be written."""
    home = tmp_path / "home"
    exp = tmp_path / "exp"
    home.mkdir()
    home.chmod(0o555)
    prefix = STRANGER
    variables = {"TMPDIR": "/nonexistent"}
    if place == "home":
        # Its files can be read only.
        variables |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
    elif place == "TMPDIR":
        # The disk is full.
        prefix = WITH_FULL_TMPDIR
        variables = {"TMPDIR": str(home), "HOME": str(home)}
    arguments = ["-m", "speakerlab", "train", "--exp", exp, *short(data)]
    done = run_as(prefix, *arguments, **variables)
    assert done.returncode == 0, done.stderr
    assert card(exp)["steps"] > 1
    assert not list(home.iterdir())
    assert load_published(exp).config.data.dir == str(data)


@pytest.mark.slow
def test_a_report_needs_no_home(trained, data, tmp_path, run):
    exp = shutil.copytree(trained, tmp_path / "exp")
    run("-m", "speakerlab", "extract", "--exp", exp, "--data", data / "test")
    trials = data / "test/trials"
    arguments = ["-m", "speakerlab", "score", "--exp", exp, "--trials", trials]
    variables = {"HOME": "/nonexistent", "TMPDIR": "/nonexistent"}
    done = run_as(STRANGER, *arguments, **variables)
    assert done.returncode == 0, done.stderr
    assert "could not be drawn" not in (exp / "report.html").read_text()


@pytest.mark.slow
def test_what_another_user_keeps_to_himself_is_refused_in_one_line(
    data, make_exp, tmp_path
):
    readable = copy_data(data, tmp_path / "own")
    train = readable / "train"
    exp = make_exp("exp")
    theirs = make_exp("theirs")
    embedder = theirs / "model/embedder.safetensors"
    pack_data_dir(train, layout=PCM)
    wav = Path(read_table(data / "train/wav.scp")["spk0-0"])
    sealed = readable / "wav/sealed.wav"
    shutil.copy(wav, sealed)

    # Mode 0 is what another user's file has under umask 077.
    for path in (sealed, embedder, *train.rglob("*")):
        if path.is_file():
            path.chmod(0)
    read_only = (train, readable / "test", theirs)
    for folder in read_only:
        folder.chmod(0o555)

    table = train / "wav.scp"
    train_command = ["train", "--exp", tmp_path / "new", *short(readable)]
    commands = [
        (table, ["check", train]),
        (readable / "test", ["pack", readable / "test"]),
        (table, ["pack", train]),
        (table, ["extract", "--exp", exp, "--data", train]),
        (table, train_command),
        (theirs / ".lock", ["train", "--exp", theirs, *short(data)]),
        (embedder, ["extract", "--exp", theirs, "--data", data / "test"]),
        (embedder, ["verify", wav, wav, "--model", theirs]),
        (sealed, ["verify", wav, sealed, "--model", exp]),
    ]
    lists = []
    for _, arguments in commands:
        lists.append([str(argument) for argument in arguments])
    done = run_as(STRANGER, "-c", REFUSALS, json.dumps(lists), USER="x")

    # The folders can be removed again after the test.
    for folder in read_only:
        folder.chmod(0o755)
    lines = done.stdout.splitlines()
    assert len(lines) == len(commands), lines
    for (path, _), line in zip(commands, lines):
        assert line.startswith(str(path)), (path, line)
        # Permission denied, or no permission.
        assert "ermission" in line, (path, line)


@pytest.mark.parametrize("umask", [0o002, 0o027, 0o077])
def test_every_file_has_the_permissions_that_the_user_wants(
    umask, tmp_path, publish_to
):
    before = os.umask(umask)
    try:
        folder = write_voices(tmp_path / "data/train")
        pack_data_dir(folder, layout=PCM)
        publish_to("data/exp/model")
    finally:
        os.umask(before)
    paths = list((tmp_path / "data").rglob("*"))
    assert len(paths) > 15
    for path in paths:
        all_bits = 0o777 if path.is_dir() else 0o666
        mode = path.stat().st_mode
        assert mode & 0o777 == all_bits & ~umask, path


def write_speakers(corpus: Path, number: int) -> Path:
    for speaker in range(number):
        folder = corpus / f"s{speaker:02d}"
        folder.mkdir(parents=True)
        for take in range(2):
            # No two are equal: copies of a recording would be left out.
            wave_S = make_wave(speaker % 20, take + 2 * (speaker // 20), 0.5)
            audio.write(folder / f"{take}.wav", wave_S, RATE)
    return corpus


def test_links_are_kept_and_what_they_name_is_replaced(tmp_path, publish_to, run):
    """The data, one data directory, the experiment and its model are links to another disk."""
    disk = tmp_path / "disk"
    home = tmp_path / "home"
    corpus = write_speakers(disk / "corpus", 21)
    home.mkdir()
    for name in ("data", "train", "exp"):
        (disk / name).mkdir()
    links = {
        home / "corpus": corpus,
        home / "data": disk / "data",
        home / "exp": disk / "exp",
        disk / "data/train": disk / "train",
        disk / "exp/model": disk / "model",
    }
    for link, target in links.items():
        if target.exists():
            link.symlink_to(target)

    # The second round replaces what the first one has written.
    arguments = ["--corpus", str(home / "corpus"), "--data", str(home / "data")]
    for _ in range(2):
        assert prepare_own(arguments) == 0
        check_data_dirs([home / "data/train", home / "data/test"])
        pack_data_dir(home / "data/train", layout=PCM)
    settings = short(home / "data")
    train = ["-m", "speakerlab", "train", "--exp", home / "exp", *settings]
    run(*train)
    model = links[disk / "exp/model"]
    shutil.move(disk / "exp/model", model)
    (disk / "exp/model").symlink_to(model)
    run(*train, "training.num_epochs=2")  # publishes again
    assert (disk / "train/shards/index.safetensors").exists()
    assert load_published(home / "exp").folder == home / "exp/model"
    published = read_json(model / "card.json")
    assert card(disk / "exp")["steps"] == published["steps"]
    for link, target in links.items():
        assert link.is_symlink()
        assert link.resolve() == target
    names = ["corpus", "data", "exp", "model", "train"]
    assert names_in(disk) == names


def test_links_in_a_circle_and_to_nothing_are_refused_in_one_line(tmp_path, run, data):
    circle = tmp_path / "circle"
    circle.symlink_to("circle")
    nothing = tmp_path / "nothing"
    nothing.symlink_to("nowhere/at/all")
    for link in (circle, nothing):
        commands = (
            ["check", link],
            ["pack", link],
            ["extract", "--exp", link, "--data", data],
        )
        for arguments in commands:
            done = run("-m", "speakerlab", *arguments, code=1)
            assert len(done.stderr.splitlines()) == 1
            assert str(link) in done.stderr
    train = ["-m", "speakerlab", "train", "--exp", circle, *short(data)]
    done = run(*train, code=1)
    assert len(done.stderr.splitlines()) == 1
    assert str(circle) in done.stderr


def test_a_training_and_its_report_in_an_oddly_named_folder(data, tmp_path, run):
    root = tmp_path / ODD
    copied = copy_data(data, root / "data")
    exp = root / "exp"
    run("-m", "speakerlab", "pack", copied / "train")
    run("-m", "speakerlab", "train", "--exp", exp, *short(copied))
    run("-m", "speakerlab", "extract", "--exp", exp, "--data", copied / "test")
    trials = copied / "test/trials"
    done = run("-m", "speakerlab", "score", "--exp", exp, "--trials", trials)
    assert "test/trials" in done.stdout
    assert "test/trials" in done.stdout
    assert load_published(exp).config.data.dir == str(copied)
    # A shell would have run `touch h`, which is in the name of the folder.
    assert not list(tmp_path.rglob("h"))


def test_file_names_that_no_table_can_hold_are_left_out_and_the_others_kept(
    tmp_path, capsys
):
    corpus = write_speakers(tmp_path / "-corpus", 21)
    data = tmp_path / "data"
    good = [
        "-x.wav",
        "a b.wav",
        "'\"`$(id).wav",
        "日本語.wav",
        "#1.WAV",
        "%s|.wav",
    ]
    hidden = ".hidden.wav"
    bad = ["new\nline.wav", os.fsdecode(b"\xff\xfe.wav"), "\x1b[31m\x85.wav\n.wav"]
    speaker = corpus / "s00"
    for take, name in enumerate((*good, *bad, hidden), start=10):
        wave_S = make_wave(0, take, 0.5)
        # Under another name first: libsndfile does not write to some of these.
        audio.write(tmp_path / "new.wav", wave_S, RATE)
        shutil.move(tmp_path / "new.wav", speaker / name)
    linked = corpus / "s01"
    (linked / "dangling.wav").symlink_to("nowhere.wav")
    (linked / "circle.wav").symlink_to("circle.wav")
    (linked / "round").symlink_to("..")
    arguments = ["--corpus", str(corpus), "--data", str(data)]
    assert prepare_own(arguments) == 0
    folders = [data / "train", data / "test"]
    check_data_dirs(folders, allow_rejected=0.5)

    listed = []
    for folder in folders:
        table = read_table(folder / "wav.scp")
        listed += [Path(path) for path in table.values()]
    # 21 speakers with two recordings.
    assert len(listed) == 42 + len(good)
    assert len(set(listed)) == len(listed)
    for name in good:
        assert speaker / name in listed
    assert speaker / hidden not in listed
    # The two broken links are rejected too.
    expected = len(bad) + 2
    assert len(read_rejected(data / "train")) == expected
    manifest = read_manifest(folders, sample_rate=RATE)
    assert len(manifest) == len(listed)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_folder_of_100_000_files_takes_time_in_proportion(tmp_path):
    """CPU seconds of preparing, checking and packing, for each file of a folder."""
    path = tmp_path / "one.wav"
    # The shortest that egs/own takes. Copies are left out, so the last samples are of each file.
    wave_S = make_wave(0, 0, 0.3)
    audio.write(path, wave_S, RATE)
    content = path.read_bytes()[:-4]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    seconds = {}
    for number in (10_000, 100_000):
        corpus = tmp_path / f"corpus{number}"
        data = tmp_path / f"data{number}"
        for speaker, count in enumerate((number, 2)):
            folder = corpus / f"who{speaker}"
            folder.mkdir(parents=True)
            for take in range(count):
                samples = struct.pack("<hh", take % 300, take // 300 - speaker)
                (folder / f"{take:06d}.wav").write_bytes(content + samples)
        before = cpu_seconds()
        train = data / "train"
        arguments = ["--corpus", corpus, "--data", data, "--num-jobs", "1"]
        commands = (
            [ROOT / "egs/own/prepare.py", *arguments],
            ["-m", "speakerlab", "check", train, "--num-workers", "1"],
            ["-m", "speakerlab", "pack", train, "--num-workers", "1"],
        )
        for command in commands:
            command = [sys.executable, *command]
            subprocess.run(command, env=environment, check=True)
        seconds[number] = (cpu_seconds() - before) / number
        manifest = read_manifest([train], sample_rate=RATE)
        assert len(manifest) == number + 2
    print(seconds)
    assert seconds[100_000] < 1.5 * seconds[10_000] < 0.005


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
