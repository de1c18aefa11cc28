#!/usr/bin/env bash
# What tests of Android need, into build/ (0.4 GB): Android's classes and dx, which makes its byte code, of Debian 11; and
# a JVM for 64-bit ARM of Debian 13, for qemu. By the machine's own mirror, unpacked and not installed, so that nothing of
# the machine changes.
set -euo pipefail
cd "$(dirname "$0")"
[[ -e build/complete ]] && exit
. ../../apt.sh
: >"$work/status"  # as on a machine that has nothing
# packages RELEASE ARCHITECTURE FOLDER PACKAGE...: unpacks packages, without what they depend on
packages() {
  local release=$1 architecture=$2 folder=$3
  shift 3
  mkdir -p "$work/$release"/{lists,archives}/partial "$work/$release/packages" "build/$folder"
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $release main" >"$work/sources.list"
  local apt=(apt-get -qq -o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts=-
    -o Dir::State="$work/$release" -o Dir::State::status="$work/status" -o Dir::Cache="$work/$release"
    -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= -o APT::Sandbox::User=root
    -o APT::Architecture="$architecture" -o APT::Architectures="$architecture")
  "${apt[@]}" update
  (cd "$work/$release/packages" && "${apt[@]}" download "$@")
  for package in "$work/$release/packages"/*.deb; do
    dpkg-deb --fsys-tarfile "$package" | tar -x --keep-directory-symlink -C "build/$folder"
  done
}
packages bullseye amd64 sdk dalvik-exchange libandroid-23-java
mkdir -p build/arm64/usr/lib
ln -sfn usr/lib build/arm64/lib
packages trixie arm64 arm64 openjdk-21-jre-headless libc6 libgcc-s1 libstdc++6 zlib1g
rm -r build/arm64/usr/share  # no JVM needs it, and its Python is not this project's
# Java's settings lie in /etc.
find build/arm64/usr/lib/jvm -type l -lname '/etc/java*' | while read -r link; do
  ln -sfn "$PWD/build/arm64$(readlink "$link")" "$link"
done
touch build/complete
