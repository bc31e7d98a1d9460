"""Use speakerlab on this system, or on a pretended one (sitecustomize.py).

    python used_there.py WORLD      # in an empty folder; WORLD: of make_world.py

Prints what happened as JSON, and exits with 1 and a line for each problem. A failure is a row of
the result, so that one start of Python serves many tests.
"""

import contextlib
import importlib
import io
import json
import logging
import multiprocessing
import shutil
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np

import speakerlab
from speakerlab.core import process

PACKAGE = Path(speakerlab.__file__).parent
NUM_WORKERS = 2
# torch's launcher of ranks wants the signals of Linux, too.
NOT_IMPORTED = {"linux": [], "darwin": [], "win32": ["speakerlab.bin.launch"]}
COMMANDS = ("embed", "verify", "check", "pack", "extract", "score", "doctor")


def take(world: Path) -> tuple[Path, Path]:
    """Copy a world into the current folder; return its experiment and its data directory.

    Its table has the paths and the line ends of this system.
    """
    here = Path.cwd()
    for name in ("exp", "test", "wav"):
        shutil.copytree(world / name, here / name)
    wavs = sorted((here / "wav").iterdir())
    lines = "".join(f"{path.stem} {path}\n" for path in wavs)
    (here / "test/wav.scp").write_text(lines, encoding="utf-8")
    return here / "exp", here / "test"


def import_all() -> list[str]:
    """Import every module; return those that cannot be imported."""
    failures: list[str] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        try:
            importlib.import_module(name.removesuffix(".__init__"))
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")
    return failures


def run(*arguments: object) -> str:
    """Run a command of speakerlab in this process; return its output, or the error."""
    from speakerlab.__main__ import run_command

    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            run_command([str(argument) for argument in arguments])
    except (ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return traceback.format_exc()
    return output.getvalue()


def lock_twice(path: Path) -> list[bool]:
    """Return whether a lock is got while another one is held, and after that."""
    from speakerlab.core.locks import try_lock

    with path.open("a+b") as first, path.open("a+b") as second:
        outcomes = [try_lock(first), try_lock(second)]
    with path.open("a+b") as third:
        return [*outcomes, try_lock(third)]


def embed_with_workers(exp: Path, data: Path) -> list[list[float]]:
    """Return emb_ND of a data directory, read by spawned worker processes."""
    import torch

    from speakerlab.checkpoints.published import load_published
    from speakerlab.data.manifest import read_manifest
    from speakerlab.inference.batches import embed_pieces

    embedder = load_published(exp).embedder.for_inference()
    manifest = read_manifest([data], sample_rate=embedder.sample_rate)
    emb_ND = embed_pieces(
        embedder,
        manifest.pieces(),
        device=torch.device("cpu"),
        num_workers=NUM_WORKERS,
    )
    return emb_ND.tolist()


def use(exp: Path, data: Path) -> dict[str, Any]:
    """Return what happened, by name."""
    wavs = sorted((data.parent / "wav").iterdir())
    used: dict[str, Any] = {
        "system": sys.platform,
        "start method": multiprocessing.get_start_method(),
        "not imported": import_all(),
        "locks": lock_twice(Path("lock")),
    }
    model = speakerlab.load(exp)
    used["embedding"] = model.embed(wavs[0]).tolist()
    used["api score"] = model.verify(wavs[0], wavs[1]).score
    used["embed"] = run("embed", *wavs[:2], "--model", exp, "--out", "emb")
    used["ids"] = Path("emb.ids").read_bytes().decode()
    used["verify"] = run("verify", *wavs[:2], "--model", exp)
    used["check"] = run("check", data, "--decode", "--num-workers", NUM_WORKERS)
    used["pack"] = run("pack", data, "--num-workers", NUM_WORKERS)
    used["extract"] = run("extract", "--exp", exp, "--data", data)
    used["score"] = run("score", "--exp", exp, "--trials", data / "trials")
    used["two processes"] = run(
        "extract", "--exp", exp, "--data", data, "--nproc", 2, "--per-speaker", 1
    )
    used["train"] = run("train", "--exp", "new", "--config", "campplus_tiny")
    used["doctor"] = run("doctor", "--model", "campplus_tiny")
    if sys.platform == "darwin":  # Linux cannot spawn data workers as Windows does
        used["with workers"] = embed_with_workers(exp, data)
    # Of shards: two calls per read on Windows.
    stem = exp / "embeddings/test/trained"
    used["extracted"] = np.load(f"{stem}.npy").tolist()
    used["extracted ids"] = Path(f"{stem}.ids").read_text(encoding="utf-8").split()
    return used


def find_problems(used: dict[str, Any], world: Path) -> list[str]:
    """Return a line for each result that differs from what Linux computed."""
    problems: list[str] = []
    failed = [line.partition(":")[0] for line in used["not imported"]]
    if failed != NOT_IMPORTED[used["system"]]:
        problems.append(f"not imported: {used['not imported']}")
    for name in COMMANDS:
        if "Error" in used[name] or "Traceback" in used[name]:
            problems.append(f"{name}: {used[name]}")
    expected = json.loads((world / "expected.json").read_text(encoding="utf-8"))
    if not np.allclose(used["embedding"], expected["embedding"], atol=1e-4):
        problems.append(f"embedding: {used['embedding']}")
    if abs(used["api score"] - expected["score"]) > 1e-4:
        problems.append(f"score: {used['api score']}, {expected['score']} on Linux")
    for name in ("train", "two processes"):
        if used["system"] != "linux" and "Linux only" not in used[name]:
            problems.append(f"{name}: {used[name]}")
    return problems


def main() -> None:
    world = Path(sys.argv[1]).resolve()
    exp, data = take(world)
    logging.basicConfig(level=logging.INFO, stream=io.StringIO())
    used = use(exp, data)
    problems = find_problems(used, world)
    print(json.dumps(used))
    sys.stderr.write("".join(f"{line}\n" for line in problems))
    # As a command ends: without cleaning up.
    process.leave(1 if problems else 0)


if __name__ == "__main__":
    main()
