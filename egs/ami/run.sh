#!/usr/bin/env bash
# This file is the same in every recipe; recipe.sh and prepare.py differ. Options: --help.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
recipe_dir=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=egs/common/stages.sh
source "$recipe_dir/../common/stages.sh"
