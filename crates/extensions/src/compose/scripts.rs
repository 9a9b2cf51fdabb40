//! What is run on a host: constant texts. Everything that varies is an argument, which no shell ever reads as anything else.
//!
//! They need a POSIX shell, GNU tar and coreutils, git for git URLs, and docker with compose 2.34 or newer.

/// What it is about is not there.
pub(super) const MISSING: i32 = 65;
/// An archive is not the one that was written.
pub(super) const CHANGED: i32 = 66;
/// An archive names files outside of its directory.
pub(super) const OUTSIDE: i32 = 67;

/// base id
pub(super) const PREPARE: &str = r#"
set -eu
umask 077
mkdir -p -- "$1/sandboxes" "$1/snapshots"
chmod 700 -- "$1/sandboxes" "$1/snapshots"
umask 022
mkdir -- "$1/sandboxes/.$2.part"
"#;

/// base id protocols url reference
pub(super) const CLONE: &str = r#"
set -eu
umask 022
export GIT_TERMINAL_PROMPT=0 GIT_ALLOW_PROTOCOL="$3" GIT_SSH_COMMAND='ssh -oBatchMode=yes'
if [ -n "$5" ]; then
    exec git clone --quiet --depth 1 "--branch=$5" -- "$4" "$1/sandboxes/.$2.part"
fi
exec git clone --quiet --depth 1 -- "$4" "$1/sandboxes/.$2.part"
"#;

/// base id, and a tar on its input
pub(super) const UPLOAD: &str = r#"
set -eu
umask 022
exec tar -C "$1/sandboxes/.$2.part" --no-same-owner -xf -
"#;

/// base id
pub(super) const PUBLISH: &str = r#"
set -eu
[ ! -e "$1/sandboxes/$2" ]
mv -T -- "$1/sandboxes/.$2.part" "$1/sandboxes/$2"
"#;

/// dir project
pub(super) const RESOLVE: &str = r#"
set -eu
cd -- "$1"
export COMPOSE_EXPERIMENTAL_GIT_REMOTE=false COMPOSE_EXPERIMENTAL_OCI_REMOTE=false
exec docker compose --project-directory "$1" --project-name "$2" config --format json --no-env-resolution
"#;

/// paths
pub(super) const REALPATHS: &str = r#"
exec realpath -z -m -- "$@"
"#;

/// dir project seconds, and the resolved configuration on its input
pub(super) const UP: &str = r#"
set -eu
cd -- "$1"
exec docker compose --project-directory "$1" --project-name "$2" --file - up --detach --wait --wait-timeout "$3" --quiet-pull 2>&1 >/dev/null
"#;

/// project
pub(super) const STATUS: &str = r#"
set -eu
cd /
exec docker compose --project-name "$1" ps --all --format json
"#;

/// base id project
pub(super) const TEARDOWN: &str = r#"
set -eu
cd /
docker compose --project-name "$3" down --volumes --remove-orphans --timeout 10
rm -rf -- "$1/sandboxes/$2" "$1/sandboxes/.$2.part"
"#;

/// base id snapshot; prints digest, size, and whether something changed while it was read
pub(super) const SNAPSHOT: &str = r#"
set -u
umask 077
part="$1/snapshots/.$3.tar.gz.part"
[ -d "$1/sandboxes/$2" ] || exit 65
mkdir -p -- "$1/snapshots" || exit 1
tar -C "$1/sandboxes/$2" --numeric-owner -czf "$part" .
status=$?
if [ "$status" -gt 1 ]; then
    rm -f -- "$part"
    exit 1
fi
set -e
sync -- "$part"
digest=$(sha256sum <"$part")
size=$(stat -c %s -- "$part")
printf '%s %s %s\n' "${digest%% *}" "$size" "$status"
"#;

/// base snapshot
pub(super) const PUBLISH_SNAPSHOT: &str = r#"
set -eu
ln -T -- "$1/snapshots/.$2.tar.gz.part" "$1/snapshots/$2.tar.gz"
rm -f -- "$1/snapshots/.$2.tar.gz.part"
sync -- "$1/snapshots"
"#;

/// base id snapshot digest
pub(super) const RESTORE: &str = r#"
set -eu
umask 022
archive="$1/snapshots/$3.tar.gz"
part="$1/sandboxes/.$2.part"
[ -f "$archive" ] && [ ! -L "$archive" ] || exit 65
digest=$(sha256sum <"$archive")
[ "${digest%% *}" = "$4" ] || exit 66
if tar --quoting-style=escape -tzf "$archive" | grep -Eq '(^/|(^|/)[.][.](/|$))'; then exit 67; fi
mkdir -- "$part"
tar -C "$part" --numeric-owner -xzpf "$archive"
[ ! -e "$1/sandboxes/$2" ]
mv -T -- "$part" "$1/sandboxes/$2"
"#;

/// base snapshot
pub(super) const DELETE_SNAPSHOT: &str = r#"
exec rm -f -- "$1/snapshots/$2.tar.gz" "$1/snapshots/.$2.tar.gz.part"
"#;
