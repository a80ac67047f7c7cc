"""Checks what crates.io and PyPI would get, in seconds and without compiling: a stage of .ci/run. scripts/release.sh compiles it.

    scripts/check/packages.py            checks all packages
    scripts/check/packages.py --names    prints their names, a crate after the ones that it depends on

A package has a description, a README, both licence texts and settings for docs.rs, and includes no file from outside of it. All have the
version of the workspace and demand it of each other. The example of the README is that of the crate `kyklos`. The changelog begins
with this version, and its entry has at most 150 lines, of which the first are about what breaks.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Lines of the entry of a release in the changelog.
MOST_LINES = 150
INCLUDE = re.compile(r'include(?:_str|_bytes)?!\(\s*(?:concat!\(\s*)?"([^"]+)"')
#: A module of tests in the file of what it tests, as rustfmt writes it.
TESTS = re.compile(r"^#\[cfg\(test\)\]\nmod \w+ \{\n.*?^\}", re.DOTALL | re.MULTILINE)


def cargo(*arguments: str) -> str:
    done = subprocess.run(["cargo", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"packages: cargo {' '.join(arguments)}\n{done.stderr}")
    return done.stdout


def published() -> list[dict]:
    """The packages that are published, each after its dependencies."""
    metadata = json.loads(cargo("metadata", "--format-version", "1", "--no-deps"))
    waiting = [each for each in metadata["packages"] if each["publish"] is None]
    names = {each["name"] for each in waiting}
    ordered: list[dict] = []
    while waiting:
        done = {each["name"] for each in ordered}
        free = [each for each in waiting if needed(each) & names <= done]
        if not free:
            sys.exit(f"packages: {', '.join(sorted(each['name'] for each in waiting))} need each other in a circle")
        ordered += sorted(free, key=lambda each: each["name"])
        waiting = [each for each in waiting if each not in free]
    return ordered


def needed(package: dict) -> set[str]:
    """The names of what a package needs on crates.io before it: also what its tests need, if it has a version."""
    return {each["name"] for each in package["dependencies"] if each["kind"] != "dev" or each["req"] != "*"}


def faults_of(package: dict, version: str, names: set[str]) -> list[str]:
    faults = []
    folder = Path(package["manifest_path"]).parent
    files = set(cargo("package", "--list", "--offline", "--allow-dirty", "-p", package["name"]).split("\n"))
    faults += [f"has no {name}" for name in ("README.md", "LICENSE-MIT", "LICENSE-APACHE", "Cargo.lock") if name not in files]
    faults += [f"has no {field}" for field in ("description", "license", "repository", "keywords", "categories") if not package[field]]
    if "docs" not in (package["metadata"] or {}):
        faults.append("has no [package.metadata.docs.rs]")
    if package["version"] != version:
        faults.append(f"has version {package['version']}, the workspace {version}")
    for each in package["dependencies"]:
        is_dropped = each["kind"] == "dev" and each["req"] == "*"
        if each.get("path") and not is_dropped:
            if each["req"] != f"={version}":
                faults.append(f"needs {each['name']} {each['req']}, not ={version}")
            if each["name"] not in names:
                faults.append(f"needs {each['name']}, which is not published")
    for name in sorted(files):
        if name.endswith(".rs"):
            # What tests include may be anywhere: packages are not tested.
            code = TESTS.sub("", (folder / name).read_text(encoding="utf-8"))
            is_test = "/tests" in name
            for included in () if is_test else INCLUDE.findall(code):
                path = (folder / name).parent.joinpath(included).resolve()
                inside = path.is_relative_to(folder) and path.relative_to(folder).as_posix()
                # The beginning of a path that a macro puts together is a folder.
                if not inside or not (inside in files or any(file.startswith(f"{inside}/") for file in files)):
                    faults.append(f"{name} includes {included}, which the package has not")
    return [f"{package['name']}: {fault}" for fault in faults]


def faults_of_texts(version: str, folders: list[str]) -> list[str]:
    faults = []
    example = re.compile(r"```rust\n(.*?)```", re.DOTALL)
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "runtime/README.md")]
    if example.findall(texts[0]) != example.findall(texts[1]):
        faults.append("README.md and runtime/README.md have unlike examples in Rust")
    entries = re.split(r"^(?=## )", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    if not entries or not entries[0].startswith(f"## {version} ("):
        faults.append(f"CHANGELOG.md does not begin with {version}")
    elif entries[0].rstrip().count("\n") + 1 > MOST_LINES:
        faults.append(f"CHANGELOG.md: the entry of {version} has more than {MOST_LINES} lines")
    elif "".join(re.findall(r"^### .*", entries[0], re.MULTILINE)[:1]) != "### What breaks":
        faults.append(f"CHANGELOG.md: the entry of {version} does not begin with what breaks")
    for folder in ("python", *folders):
        for name in ("LICENSE-MIT", "LICENSE-APACHE"):
            path = ROOT / folder / name
            if not path.exists() or path.read_bytes() != (ROOT / name).read_bytes():
                faults.append(f"{folder}/{name} is not the text of {name}")
    return faults


def main() -> None:
    packages = published()
    names = [each["name"] for each in packages]
    if sys.argv[1:] == ["--names"]:
        print("\n".join(names))
        return
    found = re.search(r'^\[workspace\.package\]\nversion = "(.+)"$', (ROOT / "Cargo.toml").read_text(encoding="utf-8"), re.MULTILINE)
    if not found:
        sys.exit("packages: the root manifest has no version")
    folders = [Path(each["manifest_path"]).parent.relative_to(ROOT).as_posix() for each in packages]
    faults = [fault for each in packages for fault in faults_of(each, found[1], set(names))] + faults_of_texts(found[1], folders)
    for fault in faults:
        print(fault, file=sys.stderr)
    if faults:
        sys.exit(1)
    print(f"packages: {len(names)} crates of {found[1]}: {', '.join(names)}")


if __name__ == "__main__":
    main()
