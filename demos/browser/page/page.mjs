// The page around page-worker.mjs: reads the form, shows what the worker has computed.
import { NO_ADAPTER } from "./words.mjs";

const REPETITIONS = 3;
const WINDOW = 128;
const $ = (id) => document.getElementById(id);
const say = (words, kind = "") => Object.assign($("status"), { textContent: words, className: kind });
let worker = null;

$("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const options = read(new FormData($("form")));
  if (options.heads % options.kvHeads) {
    say("The query heads must be a multiple of the key/value heads.", "bad");
    return;
  }
  $("fields").disabled = true;
  $("result").hidden = true;
  say("Starting …");
  try {
    worker ??= await started();
    show(options, await answer(worker, { options, window: WINDOW, repetitions: REPETITIONS }));
    say("Done.");
  } catch (error) {
    // The device may be lost: the next run begins anew.
    worker?.terminate();
    worker = null;
    say(`The run failed: ${error.message.replace(/\.$/, "")}. Press Run to open the device and try again, with fewer tokens if ` +
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
    worker = await started();
  } catch (error) {
    say(`The page cannot start: ${error.message ?? error}.`, "bad");
    return;
  }
  $("fields").disabled = false;
  say("Ready.");
}

// A worker that has loaded the library.
async function started() {
  const worker = new Worker("./page-worker.mjs", { type: "module" });
  await answer(worker).catch((error) => {
    worker.terminate();
    throw error;
  });
  return worker;
}

// What the worker says after its progress.
function answer(worker, question = null) {
  return new Promise((done, failed) => {
    worker.onerror = (error) => failed(new Error(error.message ?? "its worker did not start"));
    worker.onmessage = ({ data }) => {
      if (data.kind === "progress") say(data.words);
      else if (data.kind === "failed") failed(new Error(data.reason));
      else done(data);
    };
    if (question) worker.postMessage(question);
  });
}

function read(form) {
  const number = (name) => Number(form.get(name));
  const mask = form.get("mask");
  return {
    tokens: number("tokens"), heads: number("heads"), kvHeads: number("kvHeads"), dim: number("dim"),
    ranks: number("ranks"), dtype: form.get("dtype"), mask,
    left: mask === "window" ? WINDOW : -1, right: mask === "full" ? -1 : 0,
  };
}

function show(options, { device, verdict, other, wallMs, ranks, owners }) {
  const { rows, error, tolerance, failure } = verdict;
  const numbers = `largest error ${error.toExponential(1)}, tolerance ${tolerance.toExponential(1)}`;
  $("verdict").className = failure ? "bad" : "good";
  $("verdict").textContent = failure
    ? `WRONG: the result differs from attention in f64 (${rows} sampled rows, ${numbers}).`
    : `Exact: ${rows} sampled rows agree with attention in f64 (${numbers}).`;
  const ms = median(wallMs);
  // A wrong result has no speed.
  const otherMs = failure || other.reason || other.verdict.failure ? 0 : median(other.wallMs);
  $("speed").textContent = failure ? "" : `Kyklos: ${ms.toFixed(1)} ms, median of ${REPETITIONS} warm runs` +
    (otherMs ? `. Two-pass kernel: ${otherMs.toFixed(1)} ms, ${(otherMs / ms).toFixed(2)} times that of Kyklos.` : ".");
  $("baseline").className = other.verdict?.failure ? "bad small" : "small";
  $("baseline").textContent = other.reason
    ? `The two-pass kernel did not run: ${other.reason}.`
    : other.verdict.failure
      ? "The two-pass kernel is WRONG here, so its time means nothing."
      : `The two-pass kernel is checked too (largest error ${other.verdict.error.toExponential(1)}). It writes all scores ` +
        "to memory, then softmax, then times V. Both times include reading the result back; that of Kyklos also the " +
        "votes and messages of its ranks, which take turns on this one device: with one rank the times compare best." +
        (options.dtype === "f16" ? " The two-pass kernel has the same numbers as f32." : "");
  $("ranks").replaceChildren(...Array.from({ length: options.ranks }, (_, rank) => {
    const [tokens, sent] = ranks.slice(rank * 2, rank * 2 + 2);
    const row = document.createElement("tr");
    const cells = [rank, tokens, sent.toLocaleString("en")];
    row.append(...cells.map((words) => Object.assign(document.createElement("td"), { textContent: words })));
    const swatch = Object.assign(document.createElement("span"), { className: "swatch" });
    swatch.style.background = `var(--rank${rank})`;
    row.firstChild.prepend(swatch);
    return row;
  }));
  $("mask").innerHTML = drawing(owners, options);
  describe(device, options.dtype);
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

async function describe(device, dtype) {
  const { info, limits } = await navigator.gpu.requestAdapter();
  const name = [info.vendor, info.architecture, info.description].filter(Boolean).join(", ") || device;
  const mib = (bytes) => `${Math.floor(bytes / 2 ** 20).toLocaleString("en")} MiB`;
  $("device").textContent = `${name}${info.isFallbackAdapter ? " (software)" : ""}. Largest buffer ` +
    `${mib(limits.maxBufferSize)}, largest binding ${mib(limits.maxStorageBufferBindingSize)}, workgroup memory ` +
    `${limits.maxComputeWorkgroupStorageSize / 1024} KiB, ${limits.maxComputeInvocationsPerWorkgroup} invocations in a ` +
    `workgroup. Type: ${dtype}.`;
}

function median(values) {
  return [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)];
}
