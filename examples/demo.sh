#!/usr/bin/env bash
# The whole path on one machine's CPU: data, profiles, plan, training with and without looking at the data, report.
# Usage: examples/demo.sh [DIR]; an earlier demo in DIR is overwritten. Needs `dflop` on the PATH (`make demo` sees to it).
set -euo pipefail
dir=${1:-demo}
config="$dir/dflop.yaml"
step() { printf '\n\033[1m$ %s\033[0m\n' "$*" >&2; "$@"; }

step dflop demo-data "$dir" --force
step dflop profile data --config "$config"
# Measured anew each time: the demo compares predictions with this very hour of this machine.
step dflop profile model --config "$config" --budget-seconds 25 --recompute none --fresh
step dflop plan --config "$config"
step dflop simulate --config "$config"
step dflop train --config "$config" --compare --force
step dflop report "$dir"
