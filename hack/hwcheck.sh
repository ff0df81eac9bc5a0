#!/bin/sh
# Builds the folder FOLDER with programs that check the driver on a machine with real GPUs. That
# machine needs neither Go nor a network. Usage: hwcheck.sh FOLDER
set -eu

folder=$1
root=$(cd "$(dirname "$0")/.." && pwd)
version=${VERSION:-$(git -C "$root" describe --tags --always --dirty 2>/dev/null || echo devel)}
limit=$((50 * 1024 * 1024))
cd "$root"

# Remove FOLDER only if an earlier run of this script created it.
if [ -e "$folder/programs" ]; then rm -rf "$folder"; fi
mkdir -p "$folder/programs" "$folder/models"
folder=$(cd "$folder" && pwd)
packed=$folder/programs

export CGO_CFLAGS="${CGO_CFLAGS:--O2 -Wno-deprecated-declarations}"
build() { go build -trimpath -buildvcs=false "$@"; }
# grpcnotrace as in the image: without it the linker keeps every method of every Kubernetes API.
build -tags grpcnotrace -ldflags "-s -w -X main.version=$version" -o "$packed/gpu-kubelet-plugin" ./cmd/gpu-kubelet-plugin
go test -c -trimpath -ldflags "-s -w" -o "$packed/conformance.test" ./test/nvmlsim/conformance
# Hide the linker's warning about dlopen: the driver uses no command of the hook that calls dlopen.
build -tags netgo,osusergo -ldflags "-s -w -extldflags=-static" -o "$packed/nvidia-cdi-hook" \
    github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-cdi-hook 2>"$packed/log" || { cat "$packed/log" >&2; exit 1; }
rm "$packed/log"
${CC:-gcc} -std=gnu11 -O2 -s -Wall -Wextra -Werror -o "$packed/cudacheck" test/hwcheck/cudacheck/cudacheck.c -ldl
CGO_ENABLED=0 build -ldflags "-s -w" -o "$packed/passthrough" ./test/hwcheck/passthrough
cp "$(go run ./test/cluster/cmd/cluster program runc)" "$packed/runc"
# Without -n, gzip would store the time, and the same programs would give other bytes.
gzip -9 -n "$packed"/*

CGO_ENABLED=0 build -ldflags "-s -w" -o "$folder/hwcheck" ./test/hwcheck
cp test/nvmlsim/models/*.yaml "$folder/models/"
cp test/hardware/README.md test/hardware/writing.md test/hardware/job.yaml test/hardware/Dockerfile LICENSE "$folder/"

size=$(du -sb "$folder" | cut -f1)
[ "$size" -lt "$limit" ] || { echo "hwcheck.sh: $folder has $size bytes, more than $limit" >&2; exit 1; }
echo "$folder ($((size / 1024 / 1024)) MB): take it to the machine with the GPU and run ./hwcheck there"
