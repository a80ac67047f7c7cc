#!/usr/bin/env bash
# Makes a Python environment in a folder, for scripts that need packages: the system's Python may have no pip, or refuse
# to install. On Debian and Ubuntu the module for this is in a package of its own. Usage: scripts/tools/make-venv.sh FOLDER
set -euo pipefail
if ! python3 -c 'import ensurepip' 2>/dev/null && command -v apt-get >/dev/null; then
    echo "installing python3-venv"
    as_root=()
    [ "$(id -u)" = 0 ] || as_root=(sudo)
    "${as_root[@]}" apt-get update -qq
    DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq --no-install-recommends python3-venv
fi
python3 -m venv "$1"
