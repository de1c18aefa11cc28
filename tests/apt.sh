# Packages of a Debian release that is not the machine's own, by the machine's own mirror; to be sourced.
. /etc/os-release
mirror=$(apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' |
  awk -v release="$VERSION_CODENAME" '$2 == release && $3 == "main" { print $1; exit }')
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"  # apt's own user reads it
