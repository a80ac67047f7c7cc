// What the checks of the pages share: a server of static files, a browser, and a list of claims.
import { createServer } from "node:http";
import { createServer as createSecureServer } from "node:https";
import { readFile } from "node:fs/promises";
import { basename, extname, join } from "node:path";
import { pathToFileURL } from "node:url";

const TYPES = {
  ".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".mjs": "text/javascript", ".wasm": "application/wasm",
};

/// The files of `folder`, by default on loopback; over https with a `{ key, cert }`. `inFrontOf` has text that goes before a script,
/// also of a worker, by the script's name.
export async function serve(folder, { address = "127.0.0.1", tls = null } = {}) {
  const inFrontOf = new Map();
  const answer = async (request, response) => {
    const name = basename(new URL(request.url, "http://localhost").pathname) || "index.html";
    try {
      const body = await readFile(join(folder, name));
      response.writeHead(200, { "content-type": TYPES[extname(name)] ?? "application/octet-stream" })
        .end(inFrontOf.has(name) ? `{ ${inFrontOf.get(name)} }\n${body}` : body);
    } catch {
      response.writeHead(404).end();
    }
  };
  const server = tls ? createSecureServer(tls, answer) : createServer(answer);
  await new Promise((ready) => server.listen(0, address, ready));
  return { origin: `${tls ? "https" : "http"}://${address}:${server.address().port}`, inFrontOf, close: () => server.close() };
}

/// Headless Chromium with WebGPU on its software adapter, or with no adapter.
export async function launch(playwright, executablePath, { webgpu = true, flags = [] } = {}) {
  const { chromium } = (await import(pathToFileURL(join(playwright, "index.js")))).default;
  return chromium.launch({
    executablePath,
    args: [...(webgpu ? ["--enable-unsafe-webgpu"] : []), "--disable-background-networking", "--disable-component-update", "--no-first-run",
      ...flags],
    chromiumSandbox: process.getuid?.() !== 0,
  });
}

/// Runs `[claim, check]` one after the other; gives the number of those that failed.
export async function run(checks) {
  let failed = 0;
  for (const [claim, check] of checks) {
    const start = performance.now();
    let fault = null;
    await check().catch((error) => { fault = error; });
    failed += fault ? 1 : 0;
    console.log(`${fault ? "FAILED" : "ok    "} ${claim} [${((performance.now() - start) / 1000).toFixed(1)} s]`);
    if (fault) console.log(`       ${fault.message}`);
  }
  return failed;
}

/// For `inFrontOf` of a server: the device is lost with its 5th submission, as when its driver fails.
export const LOSE_DEVICE = `
  const submit = GPUQueue.prototype.submit;
  const open = GPUAdapter.prototype.requestDevice;
  let device, submissions = 0;
  GPUAdapter.prototype.requestDevice = async function (...args) { return (device = await open.apply(this, args)); };
  GPUQueue.prototype.submit = function (...args) {
    submit.apply(this, args);
    if (++submissions === 5) device.destroy();
  };`;
