#!/usr/bin/env bash
# Gives two files of a user of the Python package to mypy and pyright: in one everything is right, in the other one each line that
# says `mistake` must be found, and nothing else. Installs mypy, pyright and NumPy into a virtual environment under target/;
# pyright fetches its program from npm, once.
#   scripts/check/types.sh PACKAGE    a wheel, or a folder in which `kyklos` is
set -euo pipefail
cd "$(dirname "$0")/../.."
[ $# = 1 ] || { echo "usage: scripts/check/types.sh PACKAGE" >&2; exit 2; }
package=$(realpath "$1")
venv=$PWD/target/types
[ -x "$venv/bin/pip" ] || scripts/tools/make-venv.sh "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check 'mypy>=1.18,<3' 'pyright==1.1.414' numpy typing-extensions
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
rm -rf "$site/kyklos"
case $package in
*.whl) "$venv/bin/python" -m zipfile -e "$package" "$folder/wheel" && cp -r "$folder/wheel/kyklos" "$site/kyklos" ;;
*) cp -r "$package/kyklos" "$site/kyklos" ;;
esac
cp python/tests/installed/user.py python/tests/installed/mistakes.py "$folder"
cd "$folder"
expected=$(grep -n '# mistake' mistakes.py | cut -d: -f1)

# same WHO: the lines of mistakes.py on standard input are those that say `mistake`.
same() {
    local found
    found=$(sort -nu)
    [ "$found" = "$expected" ] && return
    echo "check/types: $1 finds mistakes in the lines ${found//$'\n'/ }, they are in ${expected//$'\n'/ }" >&2
    exit 1
}
for version in 3.10 3.14; do
    "$venv/bin/mypy" --strict --python-version $version user.py
    # Both end with 1 where they find something.
    { "$venv/bin/mypy" --python-version $version mistakes.py || true; } | sed -n 's/^mistakes.py:\([0-9]*\): error.*/\1/p' | same mypy
    "$venv/bin/pyright" --pythonversion $version --pythonpath "$venv/bin/python" user.py
    { "$venv/bin/pyright" --pythonversion $version --pythonpath "$venv/bin/python" mistakes.py || true; } |
        sed -n 's/.*mistakes.py:\([0-9]*\):[0-9]* - error.*/\1/p' | same pyright
done
echo "types: a file of a user is right, and $(wc -w <<<"$expected") mistakes are found, by mypy and pyright, for Python 3.10 and 3.14"
