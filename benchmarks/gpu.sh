#!/usr/bin/env bash
# Check and measure a GPU: see gpu.py. Finds or makes the Python environment, then starts it.
set -euo pipefail
# shellcheck source=egs/common/env.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../egs/common/env.sh"
find_python test
exec "$python" "$root/benchmarks/gpu.py" "$@"
