"""Folders as users have them: of others, linked, oddly named, or with very many files."""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import BARE, CONFIG, ROOT, TINY, card, copy_data
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
STRANGER = ["unshare", "--user", "--map-user=12345", "--map-group=12345"]  # not in /etc/passwd
FULL = 'mount -t tmpfs -o size=8k none "$TMPDIR" && cat /dev/zero >"$TMPDIR/fill"; exec "$@"'
WITH_FULL_TMPDIR = ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c", FULL, "bash"]
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


def run_as(prefix: list[str], *words: object, **variables: str):
    """Run `python *words` behind a prefix, with few variables and no user name."""
    if subprocess.run([*STRANGER, "true"], capture_output=True).returncode:
        pytest.skip("this machine does not let tests be another user")
    environment = {
        **{"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        **variables,
    }
    command = [*prefix, sys.executable, *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def short(data: Path) -> list[str]:
    """Settings of a training of one epoch without noise and rooms."""
    return ["--config", CONFIG, "--set", f"data.dir={data}", *TINY, "training.num_epochs=1", *BARE]


@pytest.mark.parametrize(
    "place", ["no home", *(pytest.param(x, marks=pytest.mark.slow) for x in ("home", "TMPDIR"))]
)
def test_a_user_without_a_writable_place_trains(data, tmp_path, place):
    """The data are of another user; only the experiment can be written."""
    home, exp = tmp_path / "home", tmp_path / "exp"
    home.mkdir()
    home.chmod(0o555)
    prefix, variables = STRANGER, {"TMPDIR": "/nonexistent"}
    if place == "home":  # is read-only
        variables |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
    elif place == "TMPDIR":  # is full
        prefix, variables = WITH_FULL_TMPDIR, {"TMPDIR": str(home), "HOME": str(home)}
    words = ["-m", "speakerlab", "train", "--exp", exp, *short(data)]
    done = run_as(prefix, *words, **variables)
    assert done.returncode == 0, done.stderr
    assert card(exp)["steps"] > 1 and not list(home.iterdir())
    assert load_published(exp).config.data.dir == str(data)


@pytest.mark.slow
def test_a_report_needs_no_home(trained, data, tmp_path, run):
    exp = shutil.copytree(trained, tmp_path / "exp")
    run("-m", "speakerlab", "extract", "--exp", exp, "--data", data / "test")
    words = ["-m", "speakerlab", "score", "--exp", exp, "--trials", data / "test/trials"]
    done = run_as(STRANGER, *words, HOME="/nonexistent", TMPDIR="/nonexistent")
    assert done.returncode == 0, done.stderr
    assert "could not be drawn" not in (exp / "report.html").read_text()


def test_what_another_user_keeps_to_himself_is_refused_in_one_line(data, make_exp, tmp_path):
    own, exp, theirs = copy_data(data, tmp_path / "own"), make_exp("exp"), make_exp("theirs")
    pack_data_dir(own / "train", layout=PCM)
    wav, test = Path(read_table(data / "train/wav.scp")["spk0-0"]), data / "test"
    sealed = own / "wav/sealed.wav"
    shutil.copy(wav, sealed)
    closed = [sealed, theirs / "model/embedder.safetensors", *(own / "train").rglob("*")]
    for path in [path for path in closed if path.is_file()]:
        path.chmod(0)  # as another user's file is under umask 077
    for folder in (own / "train", own / "test", theirs):
        folder.chmod(0o555)
    commands = [
        (own / "train/wav.scp", ["check", own / "train"]),
        (own / "test", ["pack", own / "test"]),
        (own / "train/wav.scp", ["pack", own / "train"]),
        (own / "train/wav.scp", ["extract", "--exp", exp, "--data", own / "train"]),
        (own / "train/wav.scp", ["train", "--exp", tmp_path / "new", *short(own)]),
        (theirs / ".lock", ["train", "--exp", theirs, *short(data)]),
        (theirs / "model/embedder.safetensors", ["extract", "--exp", theirs, "--data", test]),
        (theirs / "model/embedder.safetensors", ["verify", wav, wav, "--model", theirs]),
        (sealed, ["verify", wav, sealed, "--model", exp]),
    ]
    text = json.dumps([[str(word) for word in words] for _, words in commands])
    lines = run_as(STRANGER, "-c", REFUSALS, text, USER="x").stdout.splitlines()
    for folder in (own / "train", own / "test", theirs):
        folder.chmod(0o755)
    assert len(lines) == len(commands), lines
    for (path, _), line in zip(commands, lines):
        assert line.startswith(str(path)) and "ermission" in line, (path, line)


@pytest.mark.parametrize("umask", [0o002, 0o027, 0o077])
def test_every_file_has_the_permissions_that_the_user_wants(umask, tmp_path, publish_to):
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
        wanted = (0o777 if path.is_dir() else 0o666) & ~umask
        assert path.stat().st_mode & 0o777 == wanted, path


def write_speakers(corpus: Path, number: int) -> Path:
    for speaker in range(number):
        (corpus / f"s{speaker:02d}").mkdir(parents=True)
        for take in range(2):
            path = corpus / f"s{speaker:02d}/{take}.wav"
            audio.write(path, make_wave(speaker % 20, take, 0.5), RATE)
    return corpus


def test_links_are_kept_and_what_they_name_is_replaced(tmp_path, publish_to, run):
    """The data, one data directory, the experiment and its model are links to another disk."""
    disk, home = tmp_path / "disk", tmp_path / "home"
    corpus = write_speakers(disk / "corpus", 21)
    for folder in (disk / "data", disk / "train", disk / "exp", home):
        folder.mkdir()
    links = {home / "corpus": corpus, home / "data": disk / "data", home / "exp": disk / "exp"}
    links |= {disk / "data/train": disk / "train", disk / "exp/model": disk / "model"}
    for link, target in links.items():
        if target.exists():
            link.symlink_to(target)
    for _ in range(2):
        words = ["--corpus", str(home / "corpus"), "--data", str(home / "data")]
        assert prepare_own(words) == 0
        check_data_dirs([home / "data/train", home / "data/test"])
        pack_data_dir(home / "data/train", layout=PCM)
    train = ["-m", "speakerlab", "train", "--exp", home / "exp", *short(home / "data")]
    run(*train)
    shutil.move(disk / "exp/model", disk / "model")
    (disk / "exp/model").symlink_to(disk / "model")
    run(*train, "training.num_epochs=2")  # publishes again
    assert (disk / "train/shards/index.safetensors").exists()
    assert load_published(home / "exp").folder == home / "exp/model"
    assert (
        card(disk / "exp")["steps"] == json.loads((disk / "model/card.json").read_text())["steps"]
    )
    for link, target in links.items():
        assert link.is_symlink() and link.resolve() == target
    names = ["corpus", "data", "exp", "model", "train"]
    assert sorted(path.name for path in disk.iterdir()) == names


def test_links_in_a_circle_and_to_nothing_are_refused_in_one_line(tmp_path, run, data):
    for name, target in (("circle", "circle"), ("nothing", "nowhere/at/all")):
        link = tmp_path / name
        link.symlink_to(target)
        for words in (["check", link], ["pack", link], ["extract", "--exp", link, "--data", data]):
            done = run("-m", "speakerlab", *words, code=1)
            assert len(done.stderr.splitlines()) == 1 and str(link) in done.stderr
    done = run("-m", "speakerlab", "train", "--exp", tmp_path / "circle", *short(data), code=1)
    assert len(done.stderr.splitlines()) == 1 and str(tmp_path / "circle") in done.stderr


def test_a_training_and_its_report_in_an_oddly_named_folder(data, tmp_path, run):
    root = tmp_path / ODD
    own, exp = copy_data(data, root / "data"), root / "exp"
    run("-m", "speakerlab", "pack", own / "train")
    run("-m", "speakerlab", "train", "--exp", exp, *short(own))
    run("-m", "speakerlab", "extract", "--exp", exp, "--data", own / "test")
    done = run("-m", "speakerlab", "score", "--exp", exp, "--trials", own / "test/trials")
    assert "test/trials" in done.stdout
    assert load_published(exp).config.data.dir == str(own)
    assert not list(tmp_path.rglob("h"))


def test_file_names_that_no_table_can_hold_are_left_out_and_the_others_kept(tmp_path, capsys):
    corpus, data = write_speakers(tmp_path / "-corpus", 21), tmp_path / "data"
    good = ["-x.wav", "a b.wav", "'\"`$(id).wav", "日本語.wav", "#1.WAV", "%s|.wav", ".hidden.wav"]
    bad = ["new\nline.wav", os.fsdecode(b"\xff\xfe.wav"), "\x1b[31m\x85.wav\n.wav"]
    for name in (*good, *bad):
        shutil.copy(corpus / "s00/0.wav", corpus / "s00" / name)
    (corpus / "s01/dangling.wav").symlink_to("nowhere.wav")
    (corpus / "s01/circle.wav").symlink_to("circle.wav")
    (corpus / "s01/round").symlink_to("..")
    assert prepare_own(["--corpus", str(corpus), "--data", str(data)]) == 0
    check_data_dirs([data / "train", data / "test"], allow_rejected=0.5)
    tables = [read_table(data / name / "wav.scp") for name in ("train", "test")]
    kept = [Path(path) for table in tables for path in table.values()]
    assert len(kept) == len(set(kept)) == 42 + len(good)
    assert {corpus / "s00" / name for name in good} <= {*kept}
    assert len(read_rejected(data / "train")) == len(bad) + 2
    manifest = read_manifest([data / "train", data / "test"], sample_rate=RATE)
    assert len(manifest) == len(kept)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_folder_of_100_000_files_takes_time_in_proportion(tmp_path):
    """CPU seconds of preparing, checking and packing, for each file of a folder."""
    audio.write(tmp_path / "one.wav", make_wave(0, 0, 0.1), RATE)
    content, seconds = (tmp_path / "one.wav").read_bytes(), {}
    for number in (10_000, 100_000):
        corpus, data = tmp_path / f"corpus{number}", tmp_path / f"data{number}"
        for speaker, count in (("one", number), ("two", 2)):
            (corpus / speaker).mkdir(parents=True)
            for take in range(count):
                (corpus / speaker / f"{take:06d}.wav").write_bytes(content)
        before = cpu_seconds()
        words = ["--corpus", corpus, "--data", data, "--num-jobs", "1"]
        for command in (
            [ROOT / "egs/own/prepare.py", *words],
            ["-m", "speakerlab", "check", data / "train", "--num-workers", "1"],
            ["-m", "speakerlab", "pack", data / "train", "--num-workers", "1"],
        ):
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            subprocess.run([sys.executable, *command], env=environment, check=True)
        seconds[number] = (cpu_seconds() - before) / number
        assert len(read_manifest([data / "train"], sample_rate=RATE)) == number + 2
    print(seconds)
    assert seconds[100_000] < 1.5 * seconds[10_000] < 0.005


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
