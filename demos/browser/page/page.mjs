import init, { Call, attend, openDevice } from "./kyklos_page.js";
import { twoPass } from "./two-pass.mjs";
import { NO_ADAPTER } from "./words.mjs";

const REPETITIONS = 3;
const WINDOW = 128;
const $ = (id) => document.getElementById(id);
const say = (words, kind = "") => Object.assign($("status"), { textContent: words, className: kind });
let opened = null;

$("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const options = read(new FormData($("form")));
  if (options.heads % options.kvHeads) {
    say("The query heads must be a multiple of the key/value heads.", "bad");
    return;
  }
  $("fields").disabled = true;
  $("result").hidden = true;
  try {
    await run(options);
  } catch (error) {
    opened = null; // The device may be lost: the next run opens it again.
    say(`The run failed: ${error.message ?? error}. Press Run to open the device and try again, with fewer tokens if ` +
      "the device has too little memory.", "bad");
  } finally {
    $("fields").disabled = false;
  }
});

await begin();

async function begin() {
  $("fields").disabled = true;
  if (!navigator.gpu) {
    say("This browser offers no WebGPU, so there is no GPU to run on. Try a current Chrome, Edge, Firefox or Safari, over " +
      "https or from localhost.", "bad");
    return;
  }
  try {
    if (!(await navigator.gpu.requestAdapter())) {
      say(NO_ADAPTER, "bad");
      return;
    }
    await init();
  } catch (error) {
    say(`The page cannot start: ${error.message ?? error}.`, "bad");
    return;
  }
  $("fields").disabled = false;
  say("Ready.");
}

function read(form) {
  const number = (name) => Number(form.get(name));
  const mask = form.get("mask");
  return {
    tokens: number("tokens"), heads: number("heads"), kvHeads: number("kvHeads"), dim: number("dim"),
    ranks: number("ranks"), mask,
    left: mask === "window" ? WINDOW : -1, right: mask === "full" ? -1 : 0,
  };
}

async function run(options) {
  const { tokens, heads, kvHeads, dim, mask, ranks } = options;
  await progress("Opening the device …");
  opened ??= await openDevice();
  await progress("Making inputs and proving the plan of each rank …");
  const call = new Call(tokens, heads, kvHeads, dim, mask, WINDOW, ranks);
  await progress(`Kyklos: compiling kernels, then ${REPETITIONS} timed runs …`);
  const outcome = await attend(call, REPETITIONS);
  await progress("Computing sampled rows in f64 …");
  const verdict = call.verify(outcome.o, outcome.lse);
  await progress("The two-pass kernel, for comparison …");
  const other = await compare(call, options);
  show(call, options, outcome, verdict, other);
  say("Done.");
}

// The page is drawn before the next step holds up its thread.
function progress(words) {
  say(words);
  return new Promise((done) => setTimeout(done, 30));
}

// The two-pass kernel may need more memory than the device has; this is no failure of the run.
async function compare(call, options) {
  try {
    const { o, lse, wallMs } = await twoPass({ ...options, q: call.q(), k: call.k(), v: call.v() }, REPETITIONS);
    return { ms: median(wallMs), verdict: call.verify(o, lse) };
  } catch (error) {
    return { reason: error.message ?? String(error) };
  }
}

function show(call, options, outcome, verdict, other) {
  const { rows, error, tolerance, failure } = verdict;
  const numbers = `largest error ${error.toExponential(1)}, tolerance ${tolerance.toExponential(1)}`;
  $("verdict").className = failure ? "bad" : "good";
  $("verdict").textContent = failure
    ? `WRONG: the result differs from attention in f64 (${rows} sampled rows, ${numbers}).`
    : `Exact: ${rows} sampled rows agree with attention in f64 (${numbers}).`;
  const ms = median(outcome.wall_ms);
  // A wrong result has no speed.
  if (failure) other = { ...other, ms: 0 };
  if (other.verdict?.failure) other.ms = 0;
  $("speed").textContent = failure ? "" : `Kyklos: ${ms.toFixed(1)} ms, median of ${REPETITIONS} warm runs` +
    (other.ms ? `. Two-pass kernel: ${other.ms.toFixed(1)} ms, ${(other.ms / ms).toFixed(2)} times that of Kyklos.` : ".");
  $("baseline").className = other.verdict?.failure ? "bad small" : "small";
  $("baseline").textContent = other.reason
    ? `The two-pass kernel did not run: ${other.reason}.`
    : other.verdict.failure
      ? "The two-pass kernel is WRONG here, so its time means nothing."
      : `The two-pass kernel is checked too (largest error ${other.verdict.error.toExponential(1)}). It writes all scores ` +
        "to memory, then softmax, then times V. Both times include reading the result back; that of Kyklos also the " +
        "votes and messages of its ranks, which take turns on this one device: with one rank the times compare best.";
  $("ranks").replaceChildren(...Array.from({ length: options.ranks }, (_, rank) => {
    const [tokens, sent] = outcome.ranks.slice(rank * 2, rank * 2 + 2);
    const row = document.createElement("tr");
    const cells = [rank, tokens, sent.toLocaleString("en")];
    row.append(...cells.map((words) => Object.assign(document.createElement("td"), { textContent: words })));
    const swatch = Object.assign(document.createElement("span"), { className: "swatch" });
    swatch.style.background = `var(--rank${rank})`;
    row.firstChild.prepend(swatch);
    return row;
  }));
  $("mask").innerHTML = drawing(call.owners(), options);
  describe();
  $("result").hidden = false;
}

// Samples at most 64 queries.
function drawing(owners, { tokens, left, right, mask }) {
  const rows = Math.min(tokens, 64);
  const size = tokens / rows;
  const bars = Array.from({ length: rows }, (_, row) => {
    const query = Math.floor((row + 0.5) * size);
    const from = left < 0 ? 0 : Math.max(0, query - left);
    const to = right < 0 ? tokens : Math.min(tokens, query + right + 1);
    return `<rect x="${from}" y="${row * size}" width="${to - from}" height="${size}" fill="var(--rank${owners[query]})"/>`;
  });
  return `<svg viewBox="0 0 ${tokens} ${tokens}" role="img" aria-label="The ${mask} mask, its rows coloured by rank" ` +
    `shape-rendering="crispEdges">${bars.join("")}</svg>`;
}

async function describe() {
  const { info, limits } = await navigator.gpu.requestAdapter();
  const name = [info.vendor, info.architecture, info.description].filter(Boolean).join(", ") || opened;
  const mib = (bytes) => `${Math.floor(bytes / 2 ** 20).toLocaleString("en")} MiB`;
  $("device").textContent = `${name}${info.isFallbackAdapter ? " (software)" : ""}. Largest buffer ` +
    `${mib(limits.maxBufferSize)}, largest binding ${mib(limits.maxStorageBufferBindingSize)}, workgroup memory ` +
    `${limits.maxComputeWorkgroupStorageSize / 1024} KiB, ${limits.maxComputeInvocationsPerWorkgroup} invocations in a ` +
    "workgroup. Type: f32.";
}

function median(values) {
  return [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)];
}
