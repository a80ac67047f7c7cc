// The pages of `--report` and `--watch` in a browser: they fit a phone, a reader finds the numbers of `--json`, the live page
// follows a call to its end. Arguments: the program, the folder of Playwright, the browser, a folder for screenshots.
import { spawn, spawnSync } from "node:child_process";
import { mkdirSync, mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { pathToFileURL } from "node:url";
import { launch, run } from "../../../demos/browser/tests/browser.mjs";

const [program, playwright, executable, pictures] = process.argv.slice(2);
mkdirSync(pictures, { recursive: true });
const folder = mkdtempSync(join(tmpdir(), "kyklos-pages-"));
const browser = await launch(playwright, executable);
const PHONE = { width: 360, height: 740 };
const DESK = { width: 1280, height: 900 };
const PROBLEM = ["--shape", "1,2048,8,2,64", "--mask", "causal", "--device", "cpu"];

function demand(is, text) {
  if (!is) throw new Error(text);
}

function kyklos(words) {
  const ended = spawnSync(program, words, { encoding: "utf8", timeout: 120_000 });
  demand(ended.status === 0, `kyklos ${words.join(" ")}: ${ended.status} ${ended.stderr}`);
  return ended.stdout;
}

/** Opens a page that must neither ask another origin nor complain. */
async function open(address, options) {
  const context = await browser.newContext({ viewport: DESK, ...options });
  const page = await context.newPage();
  page.faults = [];
  page.on("pageerror", (error) => page.faults.push(error.message));
  page.on("console", (line) => line.type() === "error" && page.faults.push(line.text()));
  page.on("request", (request) => {
    const url = request.url();
    if (!url.startsWith(address) && !url.startsWith("blob:") && !url.endsWith("/favicon.ico")) page.faults.push(`asks for ${url}`);
  });
  await page.goto(address);
  return page;
}

async function close(page) {
  await page.context().close();
  demand(page.faults.length === 0, page.faults.join("; "));
}

/** The elements that make the page wider than the window. */
async function overflow(page) {
  return page.evaluate(() => {
    const wide = document.documentElement.scrollWidth;
    if (wide <= window.innerWidth) return "";
    const inside = (node) => node.closest(".scroll, pre") === null;
    const out = [...document.querySelectorAll("body *")].filter((node) => inside(node) && node.getBoundingClientRect().right > window.innerWidth + 1);
    return `${wide} px wide: ${out.slice(0, 5).map((node) => `${node.tagName}.${node.className}`).join(" ")}`;
  });
}

/** Contrast of the texts of a page with what is behind them, the least. */
async function leastContrast(page) {
  return page.evaluate(() => {
    const light = (text) => {
      const part = (value) => (value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
      const [r, g, b] = text.match(/[\d.]+/g).slice(0, 3).map((value) => part(value / 255));
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = (node) => {
      for (let at = node; at; at = at.parentElement) {
        const colour = getComputedStyle(at).backgroundColor;
        if (!/^rgba\(.*, 0\)$|transparent|color\(/.test(colour)) return colour;
      }
      return "rgb(255,255,255)";
    };
    let least = { ratio: 99, what: "" };
    for (const node of document.querySelectorAll("h1, h2, p, dt, dd, td.text, tbody th, thead th, figcaption, summary, a, li")) {
      if (!node.textContent.trim() || !node.getClientRects().length || node.closest(".heat")) continue;
      const [a, b] = [light(getComputedStyle(node).color), light(behind(node))].sort((x, y) => y - x);
      const ratio = (a + 0.05) / (b + 0.05);
      if (ratio < least.ratio) least = { ratio, what: node.textContent.slice(0, 40) };
    }
    return least;
  });
}

/** Starts a call with a live page; gives its address, and its end. */
async function watched(words) {
  const child = spawn(program, [...words, "--watch"], { stdio: ["ignore", "pipe", "pipe"] });
  // A check that fails leaves nothing behind; the launcher ends its ranks.
  process.once("exit", () => child.exitCode ?? child.kill("SIGINT"));
  const ended = new Promise((done) => child.on("exit", done));
  child.stdout.resume();
  let text = "";
  const address = await new Promise((found, lost) => {
    child.stderr.on("data", (data) => {
      text += data;
      const link = text.match(/live page: (http:\S+)/);
      if (link) found(link[1]);
    });
    child.on("exit", () => lost(new Error(text)));
  });
  return { address, child, ended, errors: () => text };
}

const report = join(folder, "run.html");
const hardware = ["--hardware", "clusters/loopback-2-cores.toml"];
const json = JSON.parse(kyklos(["attend", ...PROBLEM, "--mesh", "1x4", "--repeat", "3", "--json", ...hardware, "--report", report]));
const plan = join(folder, "plan.html");
kyklos(["plan", "--shape", "1,8192,16,8,128", "--mesh", "2x4", "--mask", "causal", "--dtype", "bf16", "--hardware", "clusters/h100-infiniband.toml", "--report", plan]);
const wide = join(folder, "wide.html");
kyklos(["plan", "--shape", "1,4096,8,8,64", "--mesh", "1x40", "--mask", "window:500,0", "--report", wide]);
const explain = join(folder, "explain.html");
kyklos(["plan", "--explain", "--shape", "1,65536,16,8,128", "--ranks", "8", "--mask", "causal", "--dtype", "bf16", "--hardware", "clusters/h100-infiniband.toml", "--report", explain]);
const records = join(folder, "records");
mkdirSync(records);
kyklos(["attend", ...PROBLEM, "--mesh", "2x2", "--record", records]);
const doctor = join(folder, "doctor.html");
kyklos(["doctor", records, "--report", doctor]);
const FILES = { run: report, plan, explain, wide, doctor };

const checks = [
  ["the page of a run has the numbers of --json", async () => {
    const page = await open(pathToFileURL(report).href);
    const rows = await page.$$eval("#ranks tbody tr", (all) => all.map((row) => [...row.querySelectorAll("data")].map((data) => Number(data.value))));
    demand(rows.length === 4, `${rows.length} rows`);
    json.per_rank.forEach((rank, index) => {
      const shown = rows[index];
      const expected = [rank.tokens, rank.compute_s, rank.wait_s, rank.copy_s];
      demand(expected.every((value, at) => Math.abs(value - shown[at]) < 1e-12), `rank ${index}: ${shown} for ${expected}`);
      demand(shown[5] === rank.bytes_sent && shown[7] === rank.peak_bytes, `rank ${index}: ${shown}`);
    });
    demand((await page.textContent("#prediction")).includes("the prediction is"), "no prediction");
    await close(page);
  }],
  ...Object.entries(FILES).flatMap(([name, path]) => ["light", "dark"].map((colorScheme) => [
    `the page of ${name} fits a desk and a phone, and its texts can be read (${colorScheme})`, async () => {
      for (const [size, viewport] of [["desk", DESK], ["phone", PHONE]]) {
        const page = await open(pathToFileURL(path).href, { viewport, colorScheme });
        await page.$$eval("details", (all) => all.forEach((one) => { one.open = true; }));
        const faults = await overflow(page);
        await page.$$eval("details", (all) => all.forEach((one) => { one.open = false; }));
        await page.screenshot({ path: join(pictures, `${name}-${size}-${colorScheme}.png`), fullPage: true });
        demand(faults === "", `${size}: ${faults}`);
        const { ratio, what } = await leastContrast(page);
        demand(ratio >= 4.5, `${size}: contrast ${ratio.toFixed(2)} of "${what}"`);
        await close(page);
      }
    }])),
  ["the page of a run is used with the keyboard alone", async () => {
    const page = await open(pathToFileURL(report).href);
    await page.keyboard.press("Tab");
    demand(await page.evaluate(() => document.activeElement.className) === "skip", "the first Tab is not on the skip link");
    await page.focus(".lane > summary");
    await page.keyboard.press("Enter");
    demand(await page.$eval(".lane", (lane) => lane.open), "Enter does not open a lane");
    const outline = await page.$eval(".lane > summary", (node) => getComputedStyle(node).outlineStyle);
    demand(outline !== "none", "the focus is not seen");
    await close(page);
  }],
  ["the page of a run is printed on few sheets", async () => {
    const page = await open(pathToFileURL(report).href, { colorScheme: "dark" });
    await page.emulateMedia({ media: "print", colorScheme: "dark" });
    demand(await page.$eval("body", (body) => getComputedStyle(body).backgroundColor) === "rgb(255, 255, 255)", "the paper is dark");
    demand(await page.$eval("h1", (head) => getComputedStyle(head).color) === "rgb(0, 0, 0)", "the ink is light");
    const grid = await page.evaluate(() => getComputedStyle(document.documentElement).getPropertyValue("--grid"));
    demand(grid === "#e9ebee", `the pictures are those of a dark screen: ${grid}`);
    await page.setViewportSize({ width: 794, height: 1123 });
    await page.screenshot({ path: join(pictures, "run-print.png"), fullPage: true });
    const pdf = await page.pdf({ path: join(pictures, "run.pdf"), format: "A4", printBackground: true });
    const sheets = pdf.toString("latin1").match(/\/Type\s*\/Page\b/g).length;
    demand(sheets <= 4, `${sheets} sheets`);
    await close(page);
  }],
  ["the live page follows a call to its end and shows the report", async () => {
    const call = await watched(["attend", "--shape", "1,4096,8,2,64", "--mask", "causal", "--device", "cpu", "--mesh", "1x3", "--repeat", "80"]);
    const [desk, phone] = [await open(call.address), await open(call.address, { viewport: PHONE, colorScheme: "dark" })];
    await desk.waitForSelector("#ranks tr");
    const part = () => desk.$eval("#done", (bar) => bar.value);
    const before = await part();
    await desk.waitForFunction((value) => document.getElementById("done").value > value, before, { timeout: 60_000 });
    const rows = await desk.$$eval("#ranks tr", (all) => all.map((row) => row.innerText));
    demand(rows.length === 3 && rows.every((row) => row.includes("tokens (33.") && /alive|starting/.test(row)), rows.join("|"));
    demand((await desk.innerText("#facts")).includes("4096 tokens"), "no facts");
    await desk.screenshot({ path: join(pictures, "live-desk-light.png"), fullPage: true });
    await phone.waitForSelector("#ranks tr");
    const boxes = await phone.$$eval("#ranks tr:first-child > *", (cells) => cells.map((cell) => cell.getBoundingClientRect().toJSON()));
    const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
    demand(boxes.length === 9 && !boxes.some((a, at) => boxes.slice(at + 1).some((b) => meet(a, b))), "cells of a rank lie on each other");
    await phone.screenshot({ path: join(pictures, "live-phone-dark.png"), fullPage: true });
    for (const page of [desk, phone]) {
      demand(await overflow(page) === "", await overflow(page));
      const { ratio, what } = await leastContrast(page);
      demand(ratio >= 4.5, `contrast ${ratio.toFixed(2)} of "${what}"`);
    }
    demand(await call.ended === 0, call.errors());
    for (const page of [desk, phone]) {
      await page.waitForSelector("#report #memory", { timeout: 60_000 });
      demand(await page.innerText("#badge") === "done", await page.innerText("#badge"));
      demand((await page.innerText("#text")).includes("ended well"), await page.innerText("#text"));
      demand(await page.$eval("#done", (bar) => bar.value) === 1, "not all steps");
      demand(await overflow(page) === "", await overflow(page));
    }
    const [saved] = await Promise.all([desk.waitForEvent("download"), desk.click("#report a[download]")]);
    demand(readFileSync(await saved.path(), "utf8").startsWith("<!DOCTYPE html>"), "the saved report is no page");
    await desk.screenshot({ path: join(pictures, "live-end-desk-light.png"), fullPage: true });
    await phone.screenshot({ path: join(pictures, "live-end-phone-dark.png"), fullPage: true });
    await close(desk);
    await close(phone);
  }],
  ["the live page says which rank was lost, and that its connection has ended", async () => {
    const call = await watched(["launch", "-n", "4", "--", "attend", ...PROBLEM, "--mesh", "1x4", "--repeat", "100000", "--progress", "json"]);
    const page = await open(call.address);
    await page.waitForFunction(() => document.querySelectorAll(".is.alive").length === 4, undefined, { timeout: 60_000 });
    const pid = call.errors().match(/"pid":(\d+),"rank":2\b/);
    demand(pid, "no process of rank 2");
    process.kill(Number(pid[1]), "SIGKILL");
    demand(await call.ended === 1, call.errors().slice(-2000));
    await page.waitForSelector("#lost:not([hidden])", { timeout: 60_000 });
    demand((await page.innerText("#lost")).includes("rank 2 died"), await page.innerText("#lost"));
    const row = await page.innerText("#ranks tr:nth-child(3)");
    demand(row.includes("lost"), row);
    demand((await page.innerText("#log")).includes("rank 2 is lost"), await page.innerText("#log"));
    await page.screenshot({ path: join(pictures, "live-lost-desk-light.png"), fullPage: true });
    await close(page);
  }],
];

const failed = await run(checks);
await browser.close();
rmSync(folder, { recursive: true });
process.exit(failed === 0 ? 0 : 1);
