// Checks a tab on another host, which is another network namespace: node two-hosts.mjs FOLDER PLAYWRIGHT CHROMIUM KYKLOS
// Starts in a network namespace of its own, as root there, with the program at 10.78.0.1. The browser is at 10.78.0.2.
import assert from "node:assert/strict";
import { execFileSync, spawn } from "node:child_process";
import { chmodSync, mkdtempSync, readFileSync, readlinkSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { launch, run, serve } from "./browser.mjs";
import { busy, exact, lend, open, says, start, words } from "./hosts.mjs";

const [folder, playwright, executablePath, kyklos] = process.argv.slice(2);
const HERE = "10.78.0.1";
const THERE = "10.78.0.2";
const sleep = (ms) => new Promise((done) => setTimeout(done, ms));
const temporary = mkdtempSync(join(tmpdir(), "two-hosts-"));
const ip = (text) => execFileSync("ip", words(text), { stdio: ["ignore", "ignore", "inherit"] });

// The namespace of the browser lives as long as this process.
const other = spawn("unshare", ["--net", "sleep", "3600"], { stdio: "ignore" });
const enter = ["--target", other.pid, "--net", "--"].map(String);
process.once("exit", () => {
  other.kill("SIGKILL");
  rmSync(temporary, { recursive: true });
});
const namespace = (pid) => readlinkSync(`/proc/${pid}/ns/net`);
while (namespace(other.pid) === namespace("self")) await sleep(20);
const there = (text) => execFileSync("nsenter", [...enter, "ip", ...words(text)]);
ip("link set lo up");
ip(`link add near type veth peer name far netns ${other.pid}`);
ip(`addr add ${HERE}/24 dev near`);
ip("link set near up");
there(`addr add ${THERE}/24 dev far`);
there("link set far up");
there("link set lo up");

// The browser, and a server of the page beside it.
const wrapper = join(temporary, "chromium");
writeFileSync(wrapper, `#!/bin/sh\nexec nsenter ${enter.join(" ")} '${executablePath}' "$@"\n`);
chmodSync(wrapper, 0o755);
const browser = await launch(playwright, wrapper);
const beside = spawn("nsenter", [...enter, process.execPath, "--input-type=module", "-e",
  `import { serve } from ${JSON.stringify(join(import.meta.dirname, "browser.mjs"))};
   console.log((await serve(${JSON.stringify(folder)})).origin);`], { stdio: ["ignore", "pipe", "inherit"] });
process.once("exit", () => beside.kill("SIGKILL"));
const atTab = await new Promise((told) => beside.stdout.once("data", (line) => told(String(line).trim())));

// A server of the page on the host, over https.
execFileSync("openssl", words(`req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=${HERE} ` +
  `-addext subjectAltName=IP:${HERE} -keyout ${temporary}/key.pem -out ${temporary}/cert.pem`), { stdio: "ignore" });
const tls = { key: readFileSync(join(temporary, "key.pem")), cert: readFileSync(join(temporary, "cert.pem")) };
const secure = await serve(folder, { address: HERE, tls });
const plain = await serve(folder, { address: HERE });

const SHAPE = "--shape 1,1536,4,2,64 --mask causal --split even --verify --json --deadline 90";
const attend = (page, options) =>
  start(kyklos, ["attend", ...words(`--ranks 3 --device cpu,cpu,tab ${SHAPE} ${options}`), "--tab-page", `${page}/tab.html`]);
const group = (options) => start(kyklos, ["launch", "--ranks", "3", "--", "attend",
  ...words(`--device cpu,cpu,tab ${SHAPE} --repeat 400 --tab-address ${HERE} ${options}`), "--tab-page", `${atTab}/tab.html`]);
const lost = /rank 2.*(the tab has not answered for 10 s|the tab has lost its network)/;

const failed = await run([
  ["the page beside the browser: exact", async () => {
    const host = attend(atTab, `--tab-address ${HERE}`);
    const [link] = await host.links(1);
    assert.match(link, /at=10\.78\.0\.1:\d+&/);
    const page = await lend(browser, link);
    exact(await host.report(), 3);
    await says(page, /^Done/);
    await page.close();
  }],
  ["the page from an https server, with a port of the host: exact", async () => {
    const host = attend(secure.origin, `--tab-address ${HERE}:4433`);
    const [link] = await host.links(1);
    // The server's own certificate is nobody's; that of a real server is known.
    const context = await browser.newContext({ ignoreHTTPSErrors: true });
    const page = await lend(context, link);
    exact(await host.report(), 3);
    await says(page, /^Done/);
    await context.close();
  }],
  ...[["without", []], ["with", ["local-network-access"]]].map(([word, permissions]) => [
    `the page from a public server, ${word} the permission for the local network`, async () => {
      // To this browser the server of the page is in the Internet, and the host in the local network.
      const strict = await launch(playwright, wrapper, {
        flags: [`--ip-address-space-overrides=${new URL(secure.origin).host}=public`],
      });
      const context = await strict.newContext({ ignoreHTTPSErrors: true, permissions });
      const host = attend(secure.origin, `--tab-address ${HERE}`);
      const page = await lend(context, (await host.links(1))[0]);
      if (permissions.length) {
        exact(await host.report(), 3);
        await says(page, /^Done/);
      } else {
        await says(page, /^It did not work: the host does not answer at .* This browser does not let this page reach your local network/);
        host.interrupt();
        await host.end();
      }
      await strict.close();
    },
  ]),
  ["the page over http from another host has no WebGPU and says so", async () => {
    const page = await open(browser, `${plain.origin}/tab.html#v=3&at=${HERE}:1&cert=${"0".repeat(64)}&token=0`);
    await says(page, /^This browser offers no WebGPU.*over https or from localhost/);
    await page.close();
  }],
  ["without --tab-address the tab looks on its own machine and says so", async () => {
    const host = attend(atTab, "");
    const page = await lend(browser, (await host.links(1))[0]);
    await says(page, /^It did not work: the host does not answer at 127\.0\.0\.1:\d+/);
    await page.close();
    host.interrupt();
    await host.end();
  }],
  ["a link that is down for 3 s ends nothing", async () => {
    const host = attend(atTab, `--tab-address ${HERE} --repeat 20`);
    const page = await lend(browser, (await host.links(1))[0]);
    await busy(page);
    ip("link set near down");
    await sleep(3000);
    ip("link set near up");
    exact(await host.report(), 3);
    await says(page, /^Done/);
    await page.close();
  }],
  ...["stop", "shrink"].map((policy) => [`a link that goes down for good is a lost rank, --on-loss ${policy}`, async () => {
    const host = group(`--on-loss ${policy}`);
    const page = await lend(browser, (await host.links(1))[0]);
    await busy(page);
    ip("link set near down");
    try {
      if (policy === "stop") assert.equal(await host.end(), 1);
      else exact(await host.report(), 2);
      assert.match(host.words(), lost);
      if (policy === "shrink") assert.match(host.words(), /without rank 2; 2 ranks start again/);
      await says(page, /^It did not work: the connection to the host is lost: Connection lost\.$/);
    } finally {
      ip("link set near up");
    }
    await page.close();
  }]),
]);
await browser.close();
secure.close();
plain.close();
process.exit(failed ? 1 : 0);
