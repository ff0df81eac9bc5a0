#!/bin/sh
# Installs missing commands from Debian's packages: need.sh COMMAND[=PACKAGE]…
# If no command is missing, it prints nothing and needs no root.
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
# Refresh the package lists only if the installation fails without it.
# shellcheck disable=SC2086 # one word per package
$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $missing >/dev/null 2>&1 && exit 0
$sudo apt-get update -q >/dev/null
# shellcheck disable=SC2086
exec $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $missing
