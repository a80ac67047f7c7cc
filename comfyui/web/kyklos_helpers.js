// What the page shows: below "Kyklos helpers" a table of helpers, read once a second while it is visible; below "Kyklos invite helper"
// the command for the other device.
import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";

const ASK_AGAIN_MS = 1000;
const LEAST_HEIGHT = 96;
const STATES = {
  waiting: "waiting for it",
  measuring: "measuring",
  ready: "ready",
  working: "working",
  lost: "lost",
  lied: "sent wrong numbers, not asked any more",
};
const STYLE =
  "box-sizing:border-box;width:100%;height:100%;overflow:auto;padding:4px 6px;font:12px/1.5 sans-serif;" +
  "color:var(--input-text,#ddd);background:var(--comfy-input-bg,#222);border-radius:4px;user-select:text";

/** @type {Set<{node: object, box: HTMLElement}>} */
const panels = new Set();
let isAsking = false;

function isSeen({ node, box }) {
  return box.isConnected && !node.flags?.collapsed && document.visibilityState === "visible";
}

/** Asks while there are panels, one question at a time. */
async function ask() {
  if (isAsking) return;
  isAsking = true;
  try {
    while (panels.size > 0) {
      const seen = [...panels].filter(isSeen);
      if (seen.length > 0) {
        const answer = await question();
        for (const { box } of seen) show(box, answer);
      }
      await new Promise((resolve) => setTimeout(resolve, ASK_AGAIN_MS));
    }
  } finally {
    isAsking = false;
  }
}

async function question() {
  try {
    const answer = await api.fetchApi("/kyklos/helpers", { cache: "no-store" });
    return answer.ok ? await answer.json() : { error: `the server answers ${answer.status}` };
  } catch (error) {
    return { error: `the server does not answer: ${error.message}` };
  }
}

function element(name, text, style = "") {
  const made = document.createElement(name);
  made.textContent = text;
  made.style.cssText = style;
  return made;
}

export function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let step = 0;
  while (count >= 1000 && step < units.length - 1) {
    count /= 1000;
    step += 1;
  }
  return `${step > 0 && count < 100 ? count.toFixed(1) : Math.round(count)} ${units[step]}`;
}

function row(helper) {
  const made = document.createElement("tr");
  const percent = Math.round(100 * helper.share);
  const cell = (text, style = "") => made.append(element("td", text, `padding:0 8px 0 0;white-space:nowrap;${style}`));
  cell(helper.name, "font-weight:bold");
  cell(helper.device ?? "");
  cell(STATES[helper.state] ?? helper.state);
  const bar = `linear-gradient(to right,#4a90d9 ${percent}%,transparent ${percent}%)`;
  cell(`${percent} %`, `min-width:64px;text-align:right;background:${bar}`);
  cell(String(helper.calls), "text-align:right");
  cell(`${bytes(helper.bytes_sent)} / ${bytes(helper.bytes_received)}`, "text-align:right");
  made.title = helper.why ?? "";
  return made;
}

function table(helpers) {
  const made = element("table", "", "border-collapse:separate;border-spacing:0 2px;width:100%");
  const head = document.createElement("tr");
  for (const title of ["helper", "device", "state", "share", "calls", "sent / received"]) {
    head.append(element("th", title, "text-align:left;font-weight:normal;opacity:.6;padding:0 8px 0 0;white-space:nowrap"));
  }
  made.append(head, ...helpers.map(row));
  return made;
}

function show(box, { open = false, helpers = [], shared = 0, alone = {}, error = "" }) {
  const parts = [];
  if (helpers.length > 0) parts.push(table(helpers));
  else if (open) parts.push(element("div", "No invitation yet: run a 'Kyklos invite helper' node.", "opacity:.7"));
  else if (!error) parts.push(element("div", "Helpers are opened when the workflow runs.", "opacity:.7"));
  for (const helper of helpers) {
    if (helper.why) parts.push(element("div", `${helper.name}: ${helper.why}`, "opacity:.7"));
  }
  if (open) {
    const reasons = Object.entries(alone).sort((one, other) => other[1] - one[1]);
    const count = reasons.reduce((sum, [, calls]) => sum + calls, 0);
    const line = element("div", `${shared} calls shared, ${count} computed here`, "opacity:.7");
    line.title = reasons.map(([reason, calls]) => `${calls}: ${reason}`).join("\n");
    parts.push(line);
  }
  if (error) parts.push(element("div", error, "color:#e0a040"));
  box.replaceChildren(...parts);
}

/** A box below the widgets of a node. Nothing of it is written into workflows. */
function addBox(node, name) {
  const box = element("div", "", STYLE);
  // The canvas below would zoom.
  box.addEventListener("wheel", (event) => event.stopPropagation());
  const options = { serialize: false, hideOnZoom: false, getMinHeight: () => LEAST_HEIGHT, getValue: () => "", setValue: () => {} };
  // The option is for what is sent to the server, the field for what is saved.
  node.addDOMWidget(name, "kyklos", box, options).serialize = false;
  return box;
}

function before(node, hook, action) {
  const others = node[hook];
  node[hook] = function (...given) {
    action(...given);
    return others?.apply(this, given);
  };
}

app.registerExtension({
  name: "kyklos.helpers",
  nodeCreated(node) {
    if (node.comfyClass === "KyklosHelpers") {
      const panel = { node, box: addBox(node, "kyklos_table") };
      panels.add(panel);
      before(node, "onRemoved", () => panels.delete(panel));
      node.setSize([Math.max(node.size[0], 460), Math.max(node.size[1], 320)]);
      ask();
    } else if (node.comfyClass === "KyklosInvite") {
      const box = addBox(node, "kyklos_command");
      box.append(element("div", "Run this node. The command for the other device appears here.", "opacity:.7"));
      before(node, "onExecuted", (output) => {
        const [command] = output?.kyklos_command ?? [];
        if (command === undefined) return;
        const line = element("code", command, "display:block;overflow-wrap:anywhere;user-select:all");
        box.replaceChildren(element("div", "On the other device:", "opacity:.7"), line);
      });
      node.setSize([Math.max(node.size[0], 380), Math.max(node.size[1], 480)]);
    }
  },
});
