#!/usr/bin/env bash
# Swift 6 of Debian 13, with all that it needs, into build/swift/ (2.6 GB) or the folder that is given: by the machine's
# own mirror, unpacked and not installed, so that nothing of the machine changes. The tests find it as build/swift.
set -euo pipefail
cd "$(dirname "$0")"
root=$(realpath -m "${1:-build/swift}")
mkdir -p build
[[ $root == "$PWD/build/swift" ]] || ln -sfn "$root" build/swift
[[ -e $root/usr/bin/swift-build ]] && exit
. ../apt.sh
mkdir -p "$work"/{lists,archives}/partial "$root"
: >"$work/status"  # as on a machine that has nothing
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror trixie main" >"$work/sources.list"
trixie() {
  apt-get -qq -y -o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts=- \
    -o Dir::State="$work" -o Dir::State::status="$work/status" -o Dir::Cache="$work" -o Dir::Cache::pkgcache= \
    -o Dir::Cache::srcpkgcache= -o APT::Install-Recommends=false "$@"
}
trixie update
trixie --download-only install base-files bash coreutils dash ca-certificates git libc6-dev libstdc++-14-dev swiftlang
mkdir -p "$root"/usr/{bin,sbin,lib,lib64}
for folder in bin sbin lib lib64; do ln -sfn "usr/$folder" "$root/$folder"; done
for package in "$work"/archives/*.deb; do
  dpkg-deb --fsys-tarfile "$package" | tar -x --keep-directory-symlink -C "$root"
done
mkdir -p "$root"/{dev,proc,tmp,work}
