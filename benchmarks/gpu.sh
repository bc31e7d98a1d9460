#!/usr/bin/env bash
# Check and measure a GPU: see gpu.py. Finds or makes the Python environment of recipes, then starts it.
set -euo pipefail
root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
python=$(python3 "$root/egs/common/environment.py" run)
exec "$python" "$root/benchmarks/gpu.py" "$@"
