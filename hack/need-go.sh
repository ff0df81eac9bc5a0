#!/bin/sh
# Checks that the Go in PATH can build everything in this repository. It does not install Go,
# because a distribution's Go is usually too old.
set -eu
cd "$(dirname "$0")/.."

# wanted is the newest Go version that one of the module files names. They are those of the driver,
# the test cluster's programs and the linters.
wanted=$(sed -n 's/^go \([0-9.]*\)$/\1/p' go.mod test/cluster/tools/go.mod test/cluster/tools/containerd/go.mod test/cluster/tools/nvidia-ctk/go.mod hack/tools/go.mod hack/vale/go.mod | sort -V | tail -n 1)
way_out="install Go $wanted or newer in PATH (https://go.dev/dl). If you have it, sudo may have dropped it
from PATH: sudo env PATH=\"\$PATH\" make …"
if ! command -v go >/dev/null 2>&1; then
    echo "Go is missing: $way_out" >&2
    exit 1
fi
for module in . test/cluster/tools test/cluster/tools/containerd test/cluster/tools/nvidia-ctk hack/tools hack/vale; do
    # go itself compares the versions. It downloads a newer Go if its settings allow that.
    if ! (cd "$module" && go list -m) >/dev/null 2>&1; then
        echo "$(command -v go) ($(GOTOOLCHAIN=local go env GOVERSION 2>/dev/null || echo unusable)) is too old: $way_out" >&2
        exit 1
    fi
done
