#!/bin/bash
# Builds the programs a second time, from a copy of the source in another folder, and compares them with those in the folder that is named: the same source must make
# the same bytes. Looks, too, that what runs as a hook on the host asks for no linker, which would listen to a container's LD_PRELOAD.
#
# usage: hack/reproducible.sh BIN VERSION [CACHE]
#
# Go takes an object of the first build for the second one if all that went into it is the same, the names of folders among it. With a build cache of its own, CACHE, the
# compilers really run again: minutes, the first time.
set -euo pipefail
bin=$1 version=$2
[ -z "${3:-}" ] || export GOCACHE=$3

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
elsewhere=$copy/some/other/folder
mkdir -p "$elsewhere"
git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
    [ ! -e "$file" ] || printf '%s\0' "$file" # one that was removed and not yet committed
done | tar --null --files-from=- -cf - | tar -xf - -C "$elsewhere"

make --no-print-directory -C "$elsewhere" VERSION="$version" build

differs=0
for program in gpu-kubelet-plugin gpu-mps nvidia-cdi-hook; do
    first=$(sha256sum <"$bin/$program") second=$(sha256sum <"$elsewhere/build/bin/$program")
    if [ "$first" = "$second" ]; then
        echo "$program: ${first%% *}, wherever it is built"
    else
        echo "$program: ${first%% *} here and ${second%% *} from a copy of the same source: go version -m of both tells which setting differs" >&2
        differs=1
    fi
done
for hook in gpu-mps nvidia-cdi-hook; do
    if readelf --program-headers "$bin/$hook" | grep -q INTERP; then
        echo "$hook asks for a dynamic linker: as a hook it would run with variables and libraries that a container names; link it statically" >&2
        differs=1
    fi
done
exit $differs
