#!/bin/sh
# Runs the fuzz targets one after another, each for TIME, and lists what each has done:
# fuzz.sh TIME [PATTERN]
# Go writes a failing input to the package's testdata/fuzz, and every later test run tries it again.
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
    # Use one fuzzing worker by default, so that the machine stays usable.
    go test -run '^$' -fuzz "^$name\$" -fuzztime "$time" -parallel "${FUZZ_WORKERS:-1}" "./$package" >"$log" 2>&1 || { failed=1 state=FAILED; }
    line=$(grep 'execs: ' "$log" | tail -n 1)
    took=$(echo "$line" | sed -n 's/.*elapsed: \([^,]*\),.*/\1/p')
    execs=$(echo "$line" | sed -n 's/.*execs: \([0-9]*\).*/\1/p')
    printf '%-62s %8s %12s %s\n' "$target" "${took:--}" "${execs:--}" "$state"
    [ -z "$state" ] || sed 's/^/    /' "$log"
done
exit $failed
