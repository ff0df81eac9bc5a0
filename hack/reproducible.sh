#!/bin/bash
# Builds the programs from a copy of the source in another folder, and compares them with the
# programs in BIN: the same source must give the same bytes. It also checks that the OCI hooks need
# no dynamic linker, because that would read a container's LD_PRELOAD.
#
# usage: hack/reproducible.sh BIN VERSION [CACHE]
#
# Go reuses a compiled package of the first build if all its inputs are the same, including folder
# names. With CACHE, a folder for a separate build cache, Go compiles every package again. That
# takes minutes the first time.
set -euo pipefail
bin=$1 version=$2
[ -z "${3:-}" ] || export GOCACHE=$3

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
elsewhere=$copy/some/other/folder
mkdir -p "$elsewhere"
git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
    [ ! -e "$file" ] || printf '%s\0' "$file" # removed, but not yet committed
done | tar --null --files-from=- -cf - | tar -xf - -C "$elsewhere"

make --no-print-directory -C "$elsewhere" VERSION="$version" build

differs=0
for program in gpu-kubelet-plugin gpu-mps kubectl-gpu nvidia-cdi-hook; do
    first=$(sha256sum <"$bin/$program") second=$(sha256sum <"$elsewhere/build/bin/$program")
    if [ "$first" = "$second" ]; then
        echo "$program: ${first%% *}, the same in both folders"
    else
        echo "$program: ${first%% *} here, but ${second%% *} from a copy of the source: compare go version -m of both" >&2
        differs=1
    fi
done
for hook in gpu-mps nvidia-cdi-hook; do
    if readelf --program-headers "$bin/$hook" | grep -q INTERP; then
        echo "$hook needs a dynamic linker, which would load libraries that a container names: link it statically" >&2
        differs=1
    fi
done
exit $differs
