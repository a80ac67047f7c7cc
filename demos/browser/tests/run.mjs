// Checks the page in Chromium: node run.mjs FOLDER PLAYWRIGHT CHROMIUM [FOLDER FOR SCREENSHOTS]
import assert from "node:assert/strict";
import { join } from "node:path";
import { launch, run as runAll, serve } from "./browser.mjs";

const [folder, playwright, executablePath, shots] = process.argv.slice(2);
const server = await serve(folder);
const { origin } = server;
const browser = await launch(playwright, executablePath);

const checks = [
  ...[["1", "full"], ["1", "causal"], ["3", "full"], ["3", "causal"], ["2", "window"]].map(([ranks, mask]) => [
    `${ranks} ranks, ${mask}: exact, and the bytes of a ring`,
    async () => {
      const page = await open();
      await run(page, { ranks, mask });
      await exact(page);
      const sent = await page.$$eval("#ranks td:last-child", (cells) => cells.map((cell) => cell.textContent));
      // Each rank forwards the keys and values of every other rank but its successor: world - 1 shards of 2 tensors.
      const total = sent.reduce((sum, bytes) => sum + Number(bytes.replaceAll(",", "")), 0);
      if (mask !== "window") assert.equal(total, (Number(ranks) - 1) * 2 * 192 * 2 * 32 * 4);
      await page.close();
    },
  ]),
  ["without WebGPU the page says so", async () => {
    const page = await open(() => Object.defineProperty(Navigator.prototype, "gpu", { value: undefined }));
    await page.waitForFunction(() => document.querySelector("#status").textContent.includes("no WebGPU"));
    assert(await page.isDisabled("#run"));
    await page.close();
  }],
  ["a wrong result is seen", async () => {
    const page = await open(() => {
      const mapped = GPUBuffer.prototype.getMappedRange;
      GPUBuffer.prototype.getMappedRange = function (...args) {
        const range = mapped.apply(this, args);
        if (this.usage & GPUBufferUsage.MAP_READ) new Float32Array(range).fill(0.25);
        return range;
      };
    });
    await run(page, { ranks: "1", mask: "full" });
    assert.match(await page.textContent("#verdict"), /^WRONG/);
    await page.close();
  }],
];

const failed = await runAll(checks);
await browser.close();
server.close();
process.exit(failed ? 1 : 0);

// A request to another origin fails the check that follows.
async function open(before) {
  const page = await browser.newPage({ viewport: { width: 800, height: 1100 } });
  page.foreign = [];
  page.on("request", (request) => {
    if (!request.url().startsWith(origin) && !request.url().startsWith("data:")) page.foreign.push(request.url());
  });
  if (before) await page.addInitScript(before);
  await page.goto(origin);
  return page;
}

async function run(page, { ranks, mask }) {
  await page.waitForFunction(() => document.querySelector("#status").textContent === "Ready.", null, { timeout: 60000 });
  await page.fill("[name=tokens]", "192");
  await page.selectOption("[name=dim]", "32");
  await page.selectOption("[name=mask]", mask);
  await page.selectOption("[name=ranks]", ranks);
  await page.focus("#run");
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => /^(Done|The run failed)/.test(document.querySelector("#status").textContent), null,
    { timeout: 120000 });
  assert.equal(await page.textContent("#status"), "Done.");
  assert.deepEqual(page.foreign, []);
  if (shots) {
    for (const scheme of ["light", "dark"]) {
      await page.emulateMedia({ colorScheme: scheme });
      await page.screenshot({ path: join(shots, `${ranks}-${mask}-${scheme}.png`), fullPage: true });
    }
  }
}

async function exact(page) {
  assert.match(await page.textContent("#verdict"), /^Exact: 64 sampled rows agree with attention in f64/);
  assert.match(await page.textContent("#speed"), /Kyklos: [\d.]+ ms.*Two-pass kernel: [\d.]+ ms/);
  assert.match(await page.textContent("#baseline"), /is checked too/);
}
