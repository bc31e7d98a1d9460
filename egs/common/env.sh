# shellcheck shell=bash
# Finds or makes the Python environment. Sourced by stages.sh and the Makefile (bash 3.2 or newer).
# Sets `root` (this repository), `python` (an interpreter with all requirements) and PYTHONPATH.

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
venv=$root/.venv
python=''
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

# Prints the path of the interpreter if it has the requirements in the given sections of
# pyproject.toml. Packages are looked up, not imported, which would take three seconds at every start;
# only torchaudio is, if it may not match torch, and for the tests everything is.
check_python='
import re, sys
def numbers(text):
    return [int(number) for number in re.match("[0-9.]*[0-9]", text).group().split(".")]
def need(name, least, found):
    if not found or numbers(found) < numbers(least):
        sys.exit("{} {} or newer is needed, found {}".format(name, least, found or "none"))
text = open(sys.argv[1]).read()
need("Python", re.search("requires-python = .>=([0-9.]+)", text).group(1), sys.version.split()[0])
from importlib.metadata import distributions, version
for section in sys.argv[2:]:
    lines = re.search("\\n" + section + r" = \[(.*?)\]\n", text, re.DOTALL).group(1)
    for name, least in re.findall(r"\"([\w-]+)[>=]=([0-9.]+)", lines):
        need(name, least, next((found.version for found in distributions(name=name)), None))
if numbers(version("torch"))[:2] != numbers(version("torchaudio"))[:2]:
    import torchaudio
if "dev" in sys.argv:
    import torch, torchaudio, numpy, scipy, soundfile, yaml, pydantic
    import tensorboard, safetensors, soxr, matplotlib, jinja2, tqdm
print(sys.executable)
'

# Locks the file that is its standard input; exit code 3 if it had to wait for another process.
lock_stdin='
import fcntl, sys
kind = getattr(fcntl, "LOCK_" + sys.argv[1])
try:
    fcntl.flock(0, kind | fcntl.LOCK_NB)
except BlockingIOError:
    print(sys.argv[2] + "; waiting for its end", file=sys.stderr)
    fcntl.flock(0, kind)
    sys.exit(3)
except OSError:  # a file system without locks
    pass
'

held='' # the locked file
# hold FILE EX|SH LINE: lock a file until `let_go` or the end of this shell and its commands. If
# another process has it, print LINE and wait. Sets `waited`.
hold() {
  local code=0 folder
  if [[ $held == "$1" ]]; then return; fi
  folder=$(dirname "$1") held=$1 waited=false
  if ! { mkdir -p "$folder" && exec 9<>"$1"; } 2>/dev/null; then
    die "$folder: cannot be written; correct its permissions, or choose another folder"
  fi
  "$python" -c "$lock_stdin" "$2" "$3" <&9 >/dev/null || code=$?
  if [[ $code == 3 ]]; then waited=true code=0; fi
  return "$code"
}

let_go() {
  exec 9>&-
  held=''
}

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
  local reason command=("$1" -c "$check_python" "$root/pyproject.toml" dependencies report)
  if [[ $2 == test ]]; then command+=(onnx aac vad dev); fi
  # The real path: with a wrapper script in between, a child could not identify its parent.
  if python=$("${command[@]}" 2>/dev/null); then return; fi
  reason=$("${command[@]}" 2>&1 || true)
  printf 'env: not using %s (%s)\n' "$1" "${reason##*$'\n'}"
  return 1
}

# make_venv run|test: make or complete .venv, with this package; for `test` also with the dev extra.
make_venv() {
  local base clear='' package=$root
  if [[ $1 == test ]]; then package+='[dev]'; fi
  if ! find_recent 'venv, ensurepip'; then
    find_recent || die "env: Python 3.10 or newer is needed; install it"
    die "env: $base has no venv or ensurepip; install it (Debian: apt install python3-venv)"
  fi
  python=$base
  hold "$venv.lock" EX "env: another process installs $venv"
  if [[ $waited == true ]] && try_python "$venv/bin/python" "$1"; then
    let_go
    return
  fi
  printf 'env: installing PyTorch, the rest of requirements.txt and speakerlab into %s: %s\n' "$venv" \
    'download 3 GB, disk 5 GB, some minutes without output'
  if [[ -e $venv ]] && ! "$venv/bin/python" -c '' 2>/dev/null; then clear=--clear; fi
  "$base" -m venv ${clear:+"$clear"} "$venv" ||
    die "env: $base cannot make $venv, see above; or activate an environment with requirements.txt"
  "$venv/bin/python" -m pip --version >/dev/null 2>&1 ||
    die "env: $venv has no pip; install pip (Debian: apt install python3-venv) and remove $venv"
  "$venv/bin/python" -m pip install -q --disable-pip-version-check \
    -r "$root/requirements.txt" -e "$package" ||
    die "env: pip install failed, see above; run the same command again to continue"
  try_python "$venv/bin/python" "$1" || die "env: $venv is incomplete; remove it and try again"
  let_go
  printf 'env: for the speakerlab command: . %s/bin/activate\n' "$venv"
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
