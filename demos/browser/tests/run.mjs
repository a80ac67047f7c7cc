// Checks the page in Chromium: node run.mjs FOLDER PLAYWRIGHT CHROMIUM [FOLDER FOR SCREENSHOTS]
import assert from "node:assert/strict";
import { join } from "node:path";
import { LOSE_DEVICE, launch, run as runAll, serve } from "./browser.mjs";

const [folder, playwright, executablePath, shots] = process.argv.slice(2);
const server = await serve(folder);
const { origin } = server;
const browser = await launch(playwright, executablePath);

const checks = [
  ...[
    ["1", "full"], ["1", "causal"], ["3", "full"], ["3", "causal"], ["2", "window"], ["3", "causal", "f16"],
  ].map(([ranks, mask, dtype = "f32"]) => [
    `${ranks} ranks, ${mask}, ${dtype}: exact, and the bytes of a ring`,
    async () => {
      const page = await open();
      await run(page, { ranks, mask, dtype });
      await exact(page);
      const sent = await page.$$eval("#ranks td:last-child", (cells) => cells.map((cell) => cell.textContent));
      // Each rank forwards the keys and values of every other rank but its successor: size - 1 shards of 2 tensors.
      const total = sent.reduce((sum, bytes) => sum + Number(bytes.replaceAll(",", "")), 0);
      if (mask !== "window") assert.equal(total, (Number(ranks) - 1) * 2 * 192 * 2 * 32 * (dtype === "f16" ? 2 : 4));
      await page.close();
    },
  ]),
  ["without WebGPU the page says so", async () => {
    const page = await open(() => Object.defineProperty(Navigator.prototype, "gpu", { value: undefined }));
    await page.waitForFunction(() => document.querySelector("#status").textContent.includes("no WebGPU"));
    assert(await page.isDisabled("#run"));
    await page.close();
  }],
  ["without an adapter the page says so", async () => {
    // Headless Chromium gives its software adapter only when asked to.
    const plain = await launch(playwright, executablePath, { webgpu: false });
    const page = await plain.newPage();
    await page.goto(origin);
    await page.waitForFunction(() => /offers no (adapter|WebGPU)/.test(document.querySelector("#status").textContent));
    assert(await page.isDisabled("#run"));
    await plain.close();
  }],
  ["a wrong result is seen", async () => {
    const page = await open(null, `
      const mapped = GPUBuffer.prototype.getMappedRange;
      GPUBuffer.prototype.getMappedRange = function (...args) {
        const range = mapped.apply(this, args);
        if (this.usage & GPUBufferUsage.MAP_READ) new Float32Array(range).fill(0.25);
        return range;
      };`);
    await run(page, { ranks: "1", mask: "full" });
    assert.match(await page.textContent("#verdict"), /^WRONG/);
    await page.close();
  }],
  ["a device that is lost in the middle is said, and the next run opens it again", async () => {
    const page = await open(null, LOSE_DEVICE);
    await begin(page, { ranks: "2", mask: "causal" });
    assert.match(await ended(page), /^The run failed: .*(lost|destroyed)/i);
    assert(await page.isHidden("#result"));
    server.inFrontOf.clear();
    await page.click("#run");
    assert.equal(await ended(page), "Done.");
    await exact(page);
    await page.close();
  }],
  ["the page answers while its worker computes", async () => {
    const page = await open(null, "GPUQueue.prototype.submit = function () { for (;;); };");
    await begin(page, { ranks: "1", mask: "full" });
    await page.waitForFunction(() => document.querySelector("#status").textContent.startsWith("Kyklos: compiling"));
    await page.emulateMedia({ colorScheme: "dark" });
    assert(await page.evaluate(() => new Promise((drawn) => requestAnimationFrame(() => drawn(true)))));
    await page.close();
  }],
];

const failed = await runAll(checks);
await browser.close();
server.close();
process.exit(failed ? 1 : 0);

// A request to another origin fails the check that follows. `before` runs before the page, `inWorker` is text before its worker.
async function open(before, inWorker) {
  const page = await browser.newPage({ viewport: { width: 800, height: 1100 } });
  page.foreign = [];
  page.on("request", (request) => {
    if (!request.url().startsWith(origin) && !request.url().startsWith("data:")) page.foreign.push(request.url());
  });
  if (before) await page.addInitScript(before);
  if (inWorker) server.inFrontOf.set("page-worker.mjs", inWorker);
  page.once("close", () => server.inFrontOf.clear());
  await page.goto(origin);
  return page;
}

async function begin(page, { ranks, mask, dtype = "f32" }) {
  await page.waitForFunction(() => document.querySelector("#status").textContent === "Ready.", null, { timeout: 60000 });
  await page.fill("[name=tokens]", "192");
  await page.selectOption("[name=dim]", "32");
  await page.selectOption("[name=mask]", mask);
  await page.selectOption("[name=ranks]", ranks);
  await page.selectOption("[name=dtype]", dtype);
  await page.focus("#run");
  await page.keyboard.press("Enter");
}

// What the page says at the end of a run.
async function ended(page) {
  await page.waitForFunction(() => /^(Done|The run failed)/.test(document.querySelector("#status").textContent), null,
    { timeout: 120000 });
  return page.textContent("#status");
}

async function run(page, options) {
  const { ranks, mask } = options;
  await begin(page, options);
  assert.equal(await ended(page), "Done.");
  assert.deepEqual(page.foreign, []);
  if (shots) {
    for (const scheme of ["light", "dark"]) {
      await page.emulateMedia({ colorScheme: scheme });
      await page.screenshot({ path: join(shots, `${ranks}-${mask}-${options.dtype ?? "f32"}-${scheme}.png`), fullPage: true });
    }
  }
}

async function exact(page) {
  assert.match(await page.textContent("#verdict"), /^Exact: 64 sampled rows agree with attention in f64/);
  assert.match(await page.textContent("#speed"), /Kyklos: [\d.]+ ms.*Two-pass kernel: [\d.]+ ms/);
  assert.match(await page.textContent("#baseline"), /is checked too/);
}
