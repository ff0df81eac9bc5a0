#!/bin/bash
# Unpacks the newest C library of this machine's Debian release for ARCH below DIR/root, with its
# headers and static library. Installs nothing. The packages stay in DIR, for the list of what a
# release contains.
#
# usage: hack/c-library.sh ARCH DIR
set -euo pipefail
arch=$1
mkdir -p "$2/apt/lists/partial" "$2/apt/archives/partial"
dir=$(cd "$2" && pwd)
touch "$dir/apt/status"
# Package lists of its own, because those of the machine have only the machine's architecture.
apt=(apt-get -q -o APT::Architecture="$arch" -o APT::Architectures="$arch" -o Dir::State::lists="$dir/apt/lists"
    -o Dir::Cache="$dir/apt" -o Dir::State::status="$dir/apt/status" -o APT::Sandbox::User=root)
packages=(libc6 libc6-dev linux-libc-dev)

run() { "$@" >"$dir/apt/log" 2>&1 || { cat "$dir/apt/log" >&2; return 1; }; }
run "${apt[@]}" update
new=$("${apt[@]}" download --print-uris "${packages[@]}" | awk '{ print $2 }' | sort)
if [ "$new" != "$(cd "$dir" && find . -name '*.deb' -printf '%P\n' | sort)" ] || [ ! -d "$dir/root" ]; then
    rm -rf "$dir"/*.deb "$dir/root" "$dir/root.tmp"
    (cd "$dir" && run "${apt[@]}" download "${packages[@]}")
    for deb in "$dir"/*.deb; do dpkg-deb -x "$deb" "$dir/root.tmp"; done
    mv "$dir/root.tmp" "$dir/root"
fi
# From Debian 13 on, the packages have only usr/lib and usr/lib64. Linker scripts and programs use
# the other names, which belong to the base system.
for name in lib lib64; do
    [ -e "$dir/root/$name" ] || [ ! -d "$dir/root/usr/$name" ] || ln -s "usr/$name" "$dir/root/$name"
done
