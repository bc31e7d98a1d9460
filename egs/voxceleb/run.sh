#!/usr/bin/env bash
# The same file in every recipe: what differs is in recipe.sh and prepare.py. Options: --help.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
recipe_dir=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=egs/common/stages.sh
source "$recipe_dir/../common/stages.sh"
