// The page around tab-worker.mjs: reads the link, asks for consent, shows what happens.
import { NO_ADAPTER } from "./words.mjs";

const $ = (id) => document.getElementById(id);
const say = (words, kind = "") => Object.assign($("status"), { textContent: words, className: kind });
const mebibytes = (bytes) => `${(bytes / 2 ** 20).toFixed(1)} MiB`;

const BLOCKED = "This browser does not let this page reach your local network. If the host is there, allow it in the settings of " +
  "this site, and open the link again.";

const link = read(location.hash);
// The token must not stay in the address, where it could be copied or kept in the history.
history.replaceState(null, "", location.pathname);

if (link.error) {
  say(link.error, "bad");
} else if (!navigator.gpu) {
  say("This browser offers no WebGPU, so there is no GPU to lend. Try a current Chrome, Edge, Firefox or Safari, over https or " +
    "from localhost.", "bad");
} else if (typeof WebTransport === "undefined") {
  say("This browser offers no WebTransport. Try a current Chrome, Edge, Firefox or Safari, over https or from localhost.", "bad");
} else if (!(await navigator.gpu.requestAdapter().catch(() => null))) {
  say(NO_ADAPTER, "bad");
} else {
  $("host").textContent = link.addresses.join(", ");
  $("fields").disabled = false;
  say("Ready. Nothing has been sent yet.");
}

$("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  // Fields that are disabled are not in the form's data.
  const memory = Number(new FormData($("form")).get("memory")) * 2 ** 30;
  $("fields").disabled = true;
  const local = await localNetwork();
  say(local === "prompt" ? "Connecting … If the browser asks, let this page reach your local network." : "Connecting …");
  // A screen that goes off puts tabs to sleep.
  const awake = await navigator.wakeLock?.request("screen").catch(() => null);
  const worker = new Worker("./tab-worker.mjs", { type: "module" });
  const end = (words, kind) => {
    say(words, kind);
    worker.terminate();
    awake?.release();
    $("stop").hidden = true;
  };
  $("stop").onclick = () => end("You have stopped. The host counts this rank as lost.", "bad");
  worker.onerror = (error) => end(`The page failed: ${error.message ?? "its worker did not start"}.`, "bad");
  worker.onmessage = ({ data }) => {
    if (data.kind === "connected") {
      say("Connected. Keep this tab open and in front.", "good");
      $("device").textContent = data.name;
      $("figures").hidden = false;
      $("stop").hidden = false;
    } else if (data.kind === "moved") {
      $("received").textContent = mebibytes(data.received);
      $("sent").textContent = mebibytes(data.sent);
    } else if (data.kind === "end") {
      const well = data.reason === "the host has ended the work";
      end(well ? "Done: the host has ended the work. You can close this tab." : `The host says: ${data.reason}.`, well ? "good" : "bad");
    } else {
      const blocked = local === "denied" && data.reason.startsWith("the host does not answer");
      end(`It did not work: ${data.reason}.${blocked ? ` ${BLOCKED}` : ""}`, "bad");
    }
  };
  worker.postMessage({ ...link, memory });
});

// Whether this page may connect to private addresses, where the browser asks for that and the page is not of this machine:
// `granted`, `prompt`, `denied` or null.
async function localNetwork() {
  if (["localhost", "127.0.0.1", "[::1]"].includes(location.hostname)) return null;
  for (const name of ["local-network", "local-network-access"]) {
    const permission = await navigator.permissions.query({ name }).catch(() => null);
    if (permission) return permission.state;
  }
  return null;
}

function read(hash) {
  const parts = new URLSearchParams(hash.slice(1));
  const [version, addresses, cert, token] = ["v", "at", "cert", "token"].map((name) => parts.get(name));
  if (!token || !addresses || !/^[0-9a-f]{64}$/.test(cert ?? "")) {
    return { error: "This link is not complete. Copy all of it: kyklos attend --device tab prints it." };
  }
  const bytes = Uint8Array.from(cert.match(/../g), (digits) => parseInt(digits, 16));
  return { version: Number(version), addresses: addresses.split(","), cert: bytes, token };
}
