"""A toy recipe that uses the real shell files.

A fake Python interpreter records the commands, so no environment is needed and nothing is trained.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Records its arguments and creates the output files of each command. TRAIN_EXITS: exit codes of
# successive trainings. TRAINING: a program to run instead of trainings. USED, CHECK_EXITS: what
# check_run.py prints, and its exit code. GATE: a file that stage 1 waits for.
PYTHON = """#!/usr/bin/env bash
if [[ $1 == -c && $2 == *flock* ]]; then exec {real} -I -S "$@"; fi
if [[ $1 == -c ]]; then printf '%s\\n' "$0" && exit; fi
if [[ $* == *common/options.py* ]]; then exec {real} -I -S "${@:3}"; fi
if [[ $* == *common/check_run.py* ]]; then
  printf '%s\\t' "$@" >"$CALLS.check"
  echo "device='a toy' used=(${USED-})"
  exit "${CHECK_EXITS-0}"
fi
printf '%s\\t' "$PPID" "$SPEAKERLAB_PARENT" "$@" >>"$CALLS" && printf '\\n' >>"$CALLS"
case "$*" in
  *' check '*) for folder in "$@"; do [[ $folder != /* ]] || touch "$folder/utt2dur"; done ;;
  *prepare.py*--download*) ;;
  *prepare.py*)
    while [[ -n ${GATE-} && ! -e $GATE ]]; do sleep 0.05; done
    mkdir -p "$DATA"/{train,test} && touch "$DATA"/{train,test}/wav.scp ;;
  *' pack '*)
    kind=shards && if [[ $* == *'--features fbank'* ]]; then kind=features; fi
    mkdir -p "$4/$kind" && touch "$4/$kind/index.safetensors" ;;
  *' train '*)
    mkdir -p "$5/model"
    if [[ -n ${TRAINING-} ]]; then exec "$TRAINING"; fi
    codes=(${TRAIN_EXITS:-0}) code=${codes[$(grep -c $'\\ttrain\\t' "$CALLS") - 1]}
    if [[ $code == 5 ]]; then echo 64 >"$5/out_of_memory"; fi
    exit "$code" ;;
  *' extract '*) mkdir -p "$5/embeddings/test" ;;
esac
"""


class Toy:
    """A copy of the shell files with a toy recipe and the fake interpreter."""

    def __init__(self, folder: Path) -> None:
        self.root, self.recipe = folder, folder / "egs/toy"
        self.recipe.mkdir(parents=True)
        (folder / "egs/common").mkdir()
        for source in ROOT.glob("egs/common/*.*"):
            shutil.copy(source, folder / "egs/common")
        shutil.copy(ROOT / "egs/mini/run.sh", self.recipe)
        (self.recipe / "recipe.sh").write_text("model=tiny\n")
        (self.recipe / "prepare.py").write_text("pass\n")
        (folder / "conf/hardware").mkdir(parents=True)
        (folder / "conf/tiny.yaml").touch()
        self.path = folder / "bin"
        self.path.mkdir()
        (self.path / "python3").write_text(PYTHON.replace("{real}", sys.executable))
        (self.path / "python3").chmod(0o755)
        self.data, self.exp, self.calls = folder / "my data", folder / "my exp", folder / "calls"

    def run(self, options: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run run.sh with `options`; clear the recorded commands first."""
        self.calls.write_text("")
        return subprocess.run(
            self.words(options), env=self.variables(**variables), capture_output=True, text=True
        )

    def words(self, options: str) -> list[str | Path]:
        """Return the command line of run.sh."""
        where = ["--data", self.data, "--exp", self.exp]
        return ["bash", self.recipe / "run.sh", *options.split(), *where]

    def variables(self, **more: str) -> dict[str, str]:
        """Return the environment of run.sh."""
        search = f"{self.path}:{os.environ['PATH']}"
        return {"PATH": search, "CALLS": str(self.calls), "DATA": str(self.data), **more}

    def recorded(self) -> list[list[str]]:
        """Return the arguments of every command of the last run, preceded by two process ids."""
        return [line.split("\t")[:-1] for line in self.calls.read_text().splitlines()]
