#!/bin/sh
# Makes sure that commands are there, by Debian's packages where they are not: need.sh COMMAND[=PACKAGE]…
# Quiet and without rights when nothing is missing.
set -eu

missing=
for need in "$@"; do
    command=${need%%=*}
    package=${need#*=}
    command -v "$command" >/dev/null 2>&1 || [ -e "$command" ] || missing="$missing $package"
done
[ -n "$missing" ] || exit 0

if ! command -v apt-get >/dev/null 2>&1; then
    echo "need.sh: please install:$missing (there is no apt-get here to do it)" >&2
    exit 1
fi
sudo=
if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null 2>&1 || { echo "need.sh: please install as root:$missing" >&2; exit 1; }
    sudo=sudo
fi
echo "installing$missing" >&2
# The lists may be old or missing: refresh them only if they do not do.
# shellcheck disable=SC2086 # one word a package
$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $missing >/dev/null 2>&1 && exit 0
$sudo apt-get update -q >/dev/null
# shellcheck disable=SC2086
exec $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $missing
