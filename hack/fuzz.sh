#!/bin/sh
# Runs every fuzz target of the module for a while, one after the other, and lists what each has done: fuzz.sh TIME [PATTERN]
# What a target fails on is written into its package's testdata/fuzz, where each later test run tries it again. Fails if any target did.
set -eu

time=$1
pattern=${2:-.}
cd "$(dirname "$0")/.."
log=$(mktemp)
trap 'rm -f "$log"' EXIT

failed=0
printf '%-62s %8s %12s\n' target time executions
for target in $(grep -rl --include='*_test.go' '^func Fuzz' api cmd pkg | sort |
    xargs grep -Ho '^func Fuzz[A-Za-z0-9_]*' | sed 's|/[^/]*:func |.|' | grep -E -e "$pattern"); do
    package=${target%.*}
    name=${target##*.}
    state=
    # One worker: more than one would say more a minute, and hold a machine that others use.
    go test -run '^$' -fuzz "^$name\$" -fuzztime "$time" -parallel "${FUZZ_WORKERS:-1}" "./$package" >"$log" 2>&1 || { failed=1 state=FAILED; }
    line=$(grep 'execs: ' "$log" | tail -n 1)
    took=$(echo "$line" | sed -n 's/.*elapsed: \([^,]*\),.*/\1/p')
    execs=$(echo "$line" | sed -n 's/.*execs: \([0-9]*\).*/\1/p')
    printf '%-62s %8s %12s %s\n' "$target" "${took:--}" "${execs:--}" "$state"
    [ -z "$state" ] || sed 's/^/    /' "$log"
done
exit $failed
