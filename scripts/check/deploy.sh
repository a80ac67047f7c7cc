#!/usr/bin/env bash
# Checks the files that docs/deploy/ranks.md offers to copy: the manifest against the schemas of Kubernetes and for
# contradictions, the unit with systemd. The schemas come from PyPI (once) and stay in target/.
set -euo pipefail
cd "$(dirname "$0")/../.."
schemas=kubernetes-validate==1.37.0
versions=(1.29 1.37)
folder=$PWD/target/deploy
mkdir -p "$folder"

# block LANGUAGE: the blocks of the page in that language.
block() { awk -v begin="\`\`\`$1" '$0 == begin { on = 1; next } /^```/ { on = 0 } on' docs/deploy/ranks.md; }

if [ "$(cat "$folder/installed" 2>/dev/null)" != "$schemas" ]; then
    scripts/tools/make-venv.sh "$folder/venv"
    "$folder/venv/bin/pip" install --quiet --disable-pip-version-check "$schemas"
    echo "$schemas" >"$folder/installed"
fi

block yaml >"$folder/job.yaml"
sed 's/completionMode/completionMod/' "$folder/job.yaml" >"$folder/misspelled.yaml"
for version in "${versions[@]}"; do
    "$folder/venv/bin/kubernetes-validate" --strict -k "$version" "$folder/job.yaml"
    if "$folder/venv/bin/kubernetes-validate" --strict --quiet -k "$version" "$folder/misspelled.yaml" >/dev/null 2>&1; then
        echo "a misspelled field of the manifest is not noticed: the schemas of $version have changed" >&2
        exit 1
    fi
done
"$folder/venv/bin/python" - "$folder/job.yaml" <<'PYTHON'
import sys, yaml

service, job = yaml.safe_load_all(open(sys.argv[1]))
name, spec = service["metadata"]["name"], job["spec"]
pod = spec["template"]["spec"]
variables = {each["name"]: each["value"] for each in pod["containers"][0]["env"]}
volumes = {each["name"] for each in pod["volumes"]}
mounted = {mount["name"] for each in pod["initContainers"] + pod["containers"] for mount in each["volumeMounts"]}
for what, one, other in [
    ("every index has a pod at the same time", spec["parallelism"], spec["completions"]),
    ("a pod is told how many there are", variables["KYKLOS_WORLD"], str(spec["completions"])),
    ("a pod is told the service", variables["KYKLOS_SERVICE"], name),
    ("the service names the pods", pod["subdomain"], name),
    ("the service selects the job's pods", service["spec"]["selector"], {"job-name": job["metadata"]["name"]}),
    ("what is mounted is there", mounted, volumes),
]:
    if one != other:
        sys.exit(f"the manifest in docs/deploy/ranks.md contradicts itself ({what}): {one} and {other}")
PYTHON

# systemd checks that the program exists, and it may not be installed here.
block ini | sed 's,/usr/local/bin/kyklos,/bin/true,' >"$folder/kyklos@.service"
if command -v systemd-analyze >/dev/null; then
    said=$(systemd-analyze verify "$folder/kyklos@.service" 2>&1) || { echo "$said" >&2; exit 1; }
    # systemd only warns about unknown keys.
    [ -z "$said" ] || { echo "$said" >&2; exit 1; }
    sed 's/^Restart=/Restrat=/' "$folder/kyklos@.service" >"$folder/misspelled@.service"
    [ -n "$(systemd-analyze verify "$folder/misspelled@.service" 2>&1)" ] || {
        echo "a misspelled key of the unit is not noticed" >&2
        exit 1
    }
    echo "the unit for systemd is valid for $(systemd-analyze --version | head -n 1)"
else
    echo "the unit for systemd: not checked, there is no systemd-analyze here"
fi
