// Checks tabs as devices of ranks: node tab.mjs FOLDER PLAYWRIGHT CHROMIUM KYKLOS [FOLDER FOR SCREENSHOTS]
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { LOSE_DEVICE, launch, run, serve } from "./browser.mjs";
import * as hosts from "./hosts.mjs";

const { busy, exact, says, words } = hosts;
const open = (link) => hosts.open(browser, link);
const lend = (link) => hosts.lend(browser, link);
const [folder, playwright, executablePath, kyklos, shots] = process.argv.slice(2);
const server = await serve(folder);
let browser = await launch(playwright, executablePath);
const SHAPE = "--shape 1,1536,4,2,64 --mask causal --split even --verify --json --deadline 90";

const failed = await run([
  ["one tab beside two native ranks: exact", async () => {
    const host = attend(`--ranks 3 --device cpu,cpu,tab ${SHAPE}`);
    const page = await lend((await host.links(1))[0]);
    const report = await host.report();
    exact(report, 3);
    assert.equal(report.devices[2].backend, "tab");
    await says(page, "Done: the host has ended the work. You can close this tab.");
    assert.doesNotMatch(page.url(), /token/);
    if (shots) await page.screenshot({ path: join(shots, "tab.png"), fullPage: true });
    await page.close();
  }],
  ["two tabs beside two native ranks, over QUIC, in f16 on the wire: exact", async () => {
    const host = attend(`--ranks 4 --device cpu,cpu,tab,tab --transport quic --wire f16 ${SHAPE}`);
    const pages = await Promise.all((await host.links(2)).map((link) => lend(link)));
    exact(await host.report(), 4);
    await Promise.all(pages.map((page) => says(page, "Done: the host has ended the work. You can close this tab.")));
    await Promise.all(pages.map((page) => page.close()));
  }],
  ["a tab that is closed in the middle is a lost rank: the others start again and are right", async () => {
    const host = group(`--on-loss shrink --repeat 400 ${SHAPE}`);
    const page = await lend((await host.links(1))[0]);
    await busy(page);
    await page.close();
    const report = await host.report();
    exact(report, 2);
    assert.match(host.words(), /rank 2 .*(the tab was closed|the tab has not answered for 10 s.*); without rank 2; 2 ranks start again/);
  }],
  ["a tab whose process is frozen is a lost rank after 10 s", async () => {
    const host = group(`--on-loss shrink --repeat 400 ${SHAPE}`);
    const page = await lend((await host.links(1))[0]);
    await busy(page);
    const renderers = descendants(process.pid).filter((pid) => commandLine(pid).includes("--type=renderer"));
    assert(renderers.length > 0);
    renderers.forEach((pid) => process.kill(pid, "SIGSTOP"));
    try {
      exact(await host.report(), 2);
      assert.match(host.words(), /the tab has not answered for 10 s: it sleeps, or its machine does; without rank 2/);
    } finally {
      renderers.forEach((pid) => process.kill(pid, "SIGCONT"));
    }
    await page.close();
  }],
  ["a browser that is killed is a lost rank", async () => {
    const host = group(`--on-loss shrink --repeat 400 ${SHAPE}`);
    const page = await lend((await host.links(1))[0]);
    await busy(page);
    descendants(process.pid).filter((pid) => commandLine(pid).includes("chromium"))
      .forEach((pid) => { try { process.kill(pid, "SIGKILL"); } catch { /* it ended with its parent */ } });
    browser = await launch(playwright, executablePath);
    exact(await host.report(), 2);
    assert.match(host.words(), /(the tab has lost its network, or its browser was ended|the tab was closed|has not answered for 10 s.*); without rank 2/);
  }],
  ["a wrong token, a used link and a page of another version are refused in words, and an honest tab comes after them", async () => {
    const host = attend(`--ranks 2 --device cpu,tab ${SHAPE}`);
    const [link] = await host.links(1);
    const wrong = await lend(link.replace(/token=../, "token=zz"));
    await says(wrong, "The host says: the host knows no such link: it has ended, or the link is not complete.");
    const old = await lend(link.replace(/#v=\d+&/, "#v=999&"));
    await says(old, /It did not work: the link has version 999 of the protocol, this page has 1: use the page of the host's release\./);
    const cut = await open(link.replace(/&token=.*/, ""));
    await says(cut, "This link is not complete. Copy all of it: kyklos attend --device tab prints it.");
    const honest = await lend(link);
    const second = await lend(link);
    await says(second, /^The host says: this link was used: the host prints a new one for each tab\.$|^It did not work: the host does not answer/);
    exact(await host.report(), 2);
    await Promise.all([wrong, old, cut, honest, second].map((page) => page.close()));
    const late = await lend(link);
    await says(late, /^It did not work: the host does not answer at 127\.0\.0\.1:\d+: it has ended, or a firewall is between/);
    await late.close();
  }],
  ["a tab whose device is lost is a lost rank, and says so", async () => {
    const host = group(`--on-loss shrink --repeat 400 ${SHAPE}`);
    const [link] = await host.links(1);
    server.inFrontOf.set("tab-worker.mjs", LOSE_DEVICE);
    const page = await lend(link);
    exact(await host.report(), 2);
    assert.match(host.words(), /rank 2 .*(lost|destroyed).*; without rank 2; 2 ranks start again/i);
    await says(page, /^It did not work: .*(lost|destroyed)/i);
    server.inFrontOf.clear();
    await page.close();
  }],
  ["without an adapter the page says so, and an honest tab comes after it", async () => {
    const host = attend(`--ranks 2 --device cpu,tab ${SHAPE}`);
    const [link] = await host.links(1);
    const plain = await launch(playwright, executablePath, { webgpu: false });
    const page = await hosts.open(plain, link);
    await says(page, /offers no (adapter|WebGPU)/);
    assert(await page.isDisabled("#lend"));
    await plain.close();
    const honest = await lend(link);
    exact(await host.report(), 2);
    await honest.close();
  }],
  ["without WebTransport or WebGPU the page says so", async () => {
    for (const [name, words] of [["gpu", /^This browser offers no WebGPU/], ["WebTransport", /^This browser offers no WebTransport/]]) {
      const page = await browser.newPage();
      await page.addInitScript(name === "gpu"
        ? () => Object.defineProperty(Navigator.prototype, "gpu", { value: undefined })
        : () => delete globalThis.WebTransport);
      await page.goto(`${server.origin}/tab.html#v=3&at=127.0.0.1:1&cert=${"0".repeat(64)}&token=0`);
      await says(page, words);
      assert(await page.isDisabled("#lend"));
      await page.close();
    }
  }],
]);
await browser.close();
server.close();
process.exit(failed ? 1 : 0);

/// All ranks in one process.
function attend(options) {
  return hosts.start(kyklos, ["attend", ...words(options), "--tab-page", `${server.origin}/tab.html`]);
}

/// Two ranks on cores and one in a tab, a process each.
function group(options) {
  return hosts.start(kyklos, ["launch", "--ranks", "3", "--", "attend", ...words(options), "--device", "cpu,cpu,tab", "--tab-page",
    `${server.origin}/tab.html`]);
}

function descendants(root) {
  const table = execFileSync("ps", ["-eo", "pid=,ppid="], { encoding: "utf8" }).trim().split("\n")
    .map((line) => line.trim().split(/\s+/).map(Number));
  const of = (parent) => table.filter(([, ppid]) => ppid === parent).flatMap(([pid]) => [pid, ...of(pid)]);
  return of(root);
}

function commandLine(pid) {
  try {
    return readFileSync(`/proc/${pid}/cmdline`, "utf8");
  } catch {
    return "";
  }
}
