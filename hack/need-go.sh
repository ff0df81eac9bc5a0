#!/bin/sh
# Makes sure that the Go in PATH can build everything here. It installs none: a distribution's Go is mostly older than what is wanted.
set -eu
cd "$(dirname "$0")/.."

# The newest version that a module file names: root, the test cluster's programs, the linters.
wanted=$(sed -n 's/^go \([0-9.]*\)$/\1/p' go.mod test/cluster/tools/go.mod hack/tools/go.mod | sort -V | tail -n 1)
way_out="Go $wanted or newer is wanted in PATH; see https://go.dev/dl, and if you have it, sudo may have dropped it from PATH: sudo env PATH=\"\$PATH\" make …"
if ! command -v go >/dev/null 2>&1; then
    echo "there is no Go here: $way_out" >&2
    exit 1
fi
for module in . test/cluster/tools hack/tools; do
    # Go itself compares the versions, and fetches a newer toolchain where it is allowed to.
    if ! (cd "$module" && go list -m) >/dev/null 2>&1; then
        echo "$(command -v go) ($(GOTOOLCHAIN=local go env GOVERSION 2>/dev/null || echo unusable)) does not do: $way_out" >&2
        exit 1
    fi
done
