#!/usr/bin/env bash
# scripts/tools/lock.sh FOLDER...: makes the lock of a package outside the workspace out of the workspace's lock, so that it has the versions
# that scripts/check/deny.sh has checked; git ignores it. A package that needs others is a failure: it has to have a lock of its own.
set -euo pipefail
cd "$(dirname "$0")/../.."
for folder in "$@"; do
    cp Cargo.lock "$folder/Cargo.lock"
    cargo metadata --quiet --format-version 1 --manifest-path "$folder/Cargo.toml" >/dev/null
    if grep '^checksum = ' "$folder/Cargo.lock" | grep -vxFf Cargo.lock; then
        echo "lock: packages of $folder/Cargo.lock with these checksums are not in the workspace's Cargo.lock" >&2
        exit 1
    fi
done
