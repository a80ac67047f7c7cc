// Runs a call and the kernel that it is compared with, so that the page goes on answering. `{ options, repetitions }` in;
// `{ kind: "progress" | "result" | "failed", … }` out, and "ready" once.
import init, { Call, attend, openDevice } from "./kyklos_page.js";
import { twoPass } from "./two-pass.mjs";

const tell = (kind, more = {}) => postMessage({ kind, ...more });
const progress = (words) => tell("progress", { words });
const reason = (error) => String(error?.message ?? error);
let device = null;

try {
  await init();
  onmessage = async ({ data }) => {
    try {
      tell("result", await run(data));
    } catch (error) {
      tell("failed", { reason: reason(error) });
    }
  };
  tell("ready");
} catch (error) {
  tell("failed", { reason: reason(error) });
}

async function run({ options, window, repetitions }) {
  const { tokens, heads, kvHeads, dim, mask, ranks, dtype } = options;
  progress("Opening the device …");
  device ??= await openDevice();
  progress("Making inputs and proving the plan of each rank …");
  const call = new Call(tokens, heads, kvHeads, dim, mask, window, ranks, dtype);
  progress(`Kyklos: compiling kernels, then ${repetitions} timed runs …`);
  const outcome = await attend(call, repetitions);
  progress("Computing sampled rows in f64 …");
  const verdict = plain(call.verify(outcome.o, outcome.lse));
  progress("The two-pass kernel, for comparison …");
  const other = await compare(call, options, repetitions);
  return { device, verdict, other, wallMs: outcome.wall_ms, ranks: outcome.ranks, owners: call.owners() };
}

// The two-pass kernel may need more memory than the device has; this is no failure of the run.
async function compare(call, options, repetitions) {
  try {
    const { o, lse, wallMs } = await twoPass({ ...options, q: call.q(), k: call.k(), v: call.v() }, repetitions);
    return { wallMs, verdict: plain(call.verify(o, lse)) };
  } catch (error) {
    return { reason: reason(error) };
  }
}

const plain = ({ rows, error, tolerance, failure }) => ({ rows, error, tolerance, failure });
