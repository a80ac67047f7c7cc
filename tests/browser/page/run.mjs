// Runs every claim: node run.mjs FOLDER PLAYWRIGHT CHROMIUM [--all] [WORDS OF A CLAIM]
import { join } from "node:path";
import { pathToFileURL } from "node:url";
import { serve } from "../../../demos/browser/tests/browser.mjs";

// Claims that break something on purpose, in pages of their own: what the browser says about it on the console is no
// fault.
const LOUD = /refuses late|device is lost|after a loss/;
// Claims that are checked with all that the adapter allows as well, in pages of their own; the others have only what
// every browser gives.
const ALSO_WITH_ALL_LIMITS = /beyond the device's largest|same bytes/;
// Left out unless it is named, or everything is asked for.
const SLOW = /8 heads of 64|64 MiB there/;

const [folder, playwright, executablePath, ...rest] = process.argv.slice(2);
const all = rest[0] === "--all";
const words = rest.slice(all ? 1 : 0).join(" ");
const CLAIM_S = all ? 600 : 120;
const { chromium } = (await import(pathToFileURL(join(playwright, "index.js")))).default;

const server = await serve(folder);
const address = `${server.origin}/`;

let failed = 0;
// The page of the claims that need none of their own, until one fails.
let shared = null;
const start = performance.now();
let browser = null;
try {
  browser = await chromium.launch({
    executablePath,
    args: [
      "--enable-unsafe-webgpu", // the software adapter, where there is no other
      "--disable-quic",
      "--disable-background-networking",
      "--disable-component-update",
      "--disable-sync",
      "--no-first-run",
    ],
    chromiumSandbox: process.getuid?.() !== 0,
  });
  const { page: first } = await open("default");
  const adapter = await first.evaluate(() => kyklos.adapter());
  if (!adapter) throw new Error("this browser offers no WebGPU adapter");
  console.log(`Chromium ${browser.version()}, WebGPU adapter: ${adapter}`);
  const claims = await first.evaluate(() => kyklos.claims());
  await first.close();
  let ran = 0;
  for (const [index, claim] of claims.entries()) {
    if (!claim.includes(words) || (SLOW.test(claim) && !words && !all)) continue;
    const limits = ALSO_WITH_ALL_LIMITS.test(claim) ? ["default", "adapter"] : ["default"];
    for (const which of limits) {
      ran += 1;
      failed += (await check(index, claim, which)) ? 0 : 1;
    }
  }
  if (ran === 0) throw new Error(`no claim is about "${words}"`);
  const seconds = ((performance.now() - start) / 1000).toFixed(0);
  console.log(`${failed ? `${failed} of ${ran} failed` : `all ${ran} hold`}, ${seconds} s`);
} catch (error) {
  console.error(`FAILED: ${String(error.message ?? error).split("\n")[0]}`);
  failed += 1;
} finally {
  await browser?.close();
  server.close();
}
process.exit(failed ? 1 : 0);

// A page with its own device, and what is seen to go wrong in it.
async function open(limits) {
  const page = await browser.newPage();
  const seen = { faults: [] };
  seen.ended = new Promise((_, end) => {
    page.on("pageerror", (error) => end(new Error(`${error.name}: ${error.message}`)));
    page.on("crash", () => end(new Error("the page crashed")));
  });
  seen.ended.catch(() => {});
  page.on("console", (message) => {
    if (["error", "warning"].includes(message.type())) seen.faults.push(message.text());
  });
  await page.goto(`${address}?limits=${limits}`);
  await page.evaluate(() => kyklosReady);
  return { page, seen };
}

async function check(index, claim, limits) {
  const start = performance.now();
  const loud = LOUD.test(claim);
  const alone = loud || limits !== "default";
  const { page, seen: now } = (!alone && shared) || (await open(limits));
  if (!alone) shared = { page, seen: now };
  now.faults.length = 0;
  let told = "";
  let timer;
  let over = alone;
  try {
    const late = new Promise((_, end) => {
      timer = setTimeout(() => end(new Error(`no answer within ${CLAIM_S} s`)), CLAIM_S * 1000);
    });
    const done = page.evaluate(([index, all]) => kyklos.check(index, all), [index, all]);
    done.catch(() => {});
    const answer = await Promise.race([done, now.ended, late]);
    told = answer.told;
    if (loud) now.faults.length = 0;
    now.faults.push(...answer.complaints);
  } catch (error) {
    now.faults.push(error.message);
    over = true;
  } finally {
    clearTimeout(timer);
  }
  if (over) {
    await page.close();
    if (!alone) shared = null;
  }
  const seconds = ((performance.now() - start) / 1000).toFixed(1);
  const holds = now.faults.length === 0;
  const where = limits === "default" ? "default limits" : "all limits";
  console.log(`${holds ? "ok    " : "FAILED"} ${claim} [${where}, ${seconds} s]${told ? `: ${told}` : ""}`);
  for (const fault of now.faults.slice(0, 12)) console.log(`       ${fault.replaceAll("\n", "\n       ")}`);
  return holds;
}
