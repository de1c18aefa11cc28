#!/usr/bin/env bash
# Lavapipe of Mesa 25, a Vulkan driver for the CPU with shader-f16, into drivers/: from the backports of the Debian
# release, by the machine's own mirror, and beside what is installed. tests/webgpu/test_float16.py finds it there.
set -euo pipefail
cd "$(dirname "$0")"
[[ -e drivers/lavapipe.json ]] && exit
. ../apt.sh
mkdir -p "$work/lists/partial" drivers
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $VERSION_CODENAME-backports main" \
  >"$work/sources.list"
backports() {
  apt-get -qq -o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts=- \
    -o Dir::State::Lists="$work/lists" -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= "$@"
}
backports update
(cd "$work" && backports download mesa-vulkan-drivers)
dpkg-deb -x "$work"/mesa-vulkan-drivers_*.deb "$work/mesa"
find "$work/mesa" -name libvulkan_lvp.so -exec install -m 644 {} drivers/ \;
printf '{"file_format_version": "1.0.0", "ICD": {"api_version": "1.4.0", "library_path": "%s"}}\n' \
  "$PWD/drivers/libvulkan_lvp.so" >drivers/lavapipe.json
