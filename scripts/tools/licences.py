"""Prints the licence texts of all crates that are linked into a program or library of the workspace, each text once.

    scripts/tools/licences.py PACKAGE TARGET > LICENSE-THIRD-PARTY

Reads what cargo has downloaded; needs nothing but Python 3.10. A crate without a text in its package gets its licence expression and
its authors. A crate without either is an error.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

#: How files with licence texts and notices are named. Texts of vendored code lie in folders below.
NAMES = re.compile(r"^(licen[cs]e|copying|notice|unlicense|copyright)", re.IGNORECASE)
#: Source files whose names begin so.
SOURCES = {".rs", ".c", ".h", ".py", ".go", ".pl", ".json", ".toml", ".html", ".yml", ".yaml"}
#: Folders with what is not linked: tests and tools of vendored C code.
LEFT_OUT = {"tests", "test", "testdata", "examples", "benches", "tool", "tools", "util", "node_modules", ".github"}


def linked(package: str, target: str) -> list[dict]:
    """The crates that are linked into ``package``, without those of the workspace."""
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--filter-platform", target]
    metadata = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    packages = {each["id"]: each for each in metadata["packages"]}
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    waiting = [each["id"] for each in metadata["packages"] if each["name"] == package and each["source"] is None]
    if not waiting:
        sys.exit(f"licences: the workspace has no package {package}")
    seen = set(waiting)
    while waiting:
        for dependency in nodes[waiting.pop()]["deps"]:
            is_linked = any(kind["kind"] is None for kind in dependency["dep_kinds"])
            # Macros run in the compiler only.
            is_macro = any("proc-macro" in each["kind"] for each in packages[dependency["pkg"]]["targets"])
            if is_linked and not is_macro and dependency["pkg"] not in seen:
                seen.add(dependency["pkg"])
                waiting.append(dependency["pkg"])
    found = [packages[each] for each in seen if packages[each]["source"] is not None]
    return sorted(found, key=lambda each: (each["name"], each["version"]))


def texts(crate: dict) -> list[str]:
    """The licence texts in the package of a crate."""
    folder = Path(crate["manifest_path"]).parent
    files = [path for path in sorted(folder.rglob("*")) if NAMES.match(path.name) and path.suffix not in SOURCES and path.is_file()]
    files = [path for path in files if not LEFT_OUT & set(path.relative_to(folder).parts[:-1])]
    read = (path.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n").strip() for path in files)
    return [text for text in read if text]


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: licences.py PACKAGE TARGET")
    crates = linked(*sys.argv[1:])
    of_text: dict[str, list[str]] = {}
    without = []
    for crate in crates:
        name = f"{crate['name']} {crate['version']}"
        found = texts(crate)
        for text in found:
            of_text.setdefault(text, []).append(name)
        if not found:
            if not crate["license"]:
                sys.exit(f"licences: {name} has neither a licence text nor an expression")
            authors = ", ".join(crate["authors"]) or crate["repository"] or "its authors"
            without.append(f"{name}: {crate['license']}, by {authors}")
    print("Software of others that is linked into this one, with the licences of each.\n")
    for crate in crates:
        print(f"{crate['name']} {crate['version']}: {crate['license'] or 'see its text below'}")
    print("The Rust standard library: MIT OR Apache-2.0, by the Rust project developers")
    print("\nThese packages have no text of their own; the texts of their licences are among those below, or in LICENSE-MIT and LICENSE-APACHE.\n")
    print("\n".join(without))
    for text, names in sorted(of_text.items(), key=lambda item: item[1]):
        print(f"\n{'=' * 100}\n{', '.join(dict.fromkeys(names))}\n{'-' * 100}\n{text}")


if __name__ == "__main__":
    main()
