#!/usr/bin/env bash
# The whole path on one machine's CPU: data, profiles, plan, training with and without looking at the data, report.
# Usage: examples/demo.sh [DIR]; an earlier demo in DIR is overwritten. Needs `dflop` on the PATH (`make demo` sees to it).
set -euo pipefail
dir=${1:-demo}
config="$dir/dflop.yaml"
steps=8 count=0
# What comes next and about how long it takes, then the command as one would type it.
step() {
    count=$((count + 1))
    printf '\n\033[1m[%d/%d] %s\n$ %s\033[0m\n' "$count" "$steps" "$1" "${*:2}" >&2
    "${@:2}"
}

step "Make a dataset and a model (2 s)" dflop demo-data "$dir" --force
step "Read the sizes of all samples (1 s)" dflop profile data --config "$config"
# Measured anew each time: the demo compares predictions with this very hour of this machine.
step "Measure the model's modules (30 s)" dflop profile model --config "$config" --budget-seconds 20 --recompute none --fresh
# A pipeline, so that there is something to see: on two ranks, data parallelism may be faster.
step "Search the layouts (3 s)" dflop plan --config "$config" --only colocated=false
step "Simulate every arm (1 s)" dflop simulate --config "$config"
# Two ranks hide nearly everything behind each other: what larger clusters of the same data and model would do.
step "Simulate larger clusters (5 s)" dflop simulate --config "$config" --num-ranks 8,16,32,64
# Baselines that run ahead are among the five arms.
step "Train with five arms in turns (1.5 minutes; 20 s until the first step)" dflop train --config "$config" --compare --steps 6 --force
step "Write the report (1 s)" dflop report "$dir"
