// Shows the events of rank 0. Every text is set as text, never as HTML; the report at the end is a page of kyklos itself, and
// the policy of this page runs no script of it.

const at = (id) => document.getElementById(id);
const rows = new Map();
let source;
let ended = false;
let lastState = "";
let lastElapsed = 0;

const HEALTH = {
  starting: "… starting", alive: "● alive", finished: "✓ finished",
  slow: "▲ slow", silent: "▲ silent", lost: "✕ lost",
};
const COLUMNS = ["rank", "device", "share", "health", "progress", "doing", "computed", "waited", "copied"];
const TEXTS = new Set(["device", "health", "progress", "doing"]);

function duration(seconds) {
  if (seconds === null) return "";
  if (seconds >= 60) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  return seconds >= 1e-3 ? `${(seconds * 1e3).toFixed(1)} ms` : `${Math.round(seconds * 1e6)} µs`;
}

function set(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function say(text) {
  const item = document.createElement("li");
  const time = document.createElement("time");
  time.textContent = duration(lastElapsed);
  item.append(time, text);
  at("log").append(item);
  while (at("log").childElementCount > 200) at("log").firstElementChild.remove();
  at("log").scrollTop = at("log").scrollHeight;
}

function newRow(rank) {
  const tr = document.createElement("tr");
  const cells = {};
  for (const name of COLUMNS) {
    const cell = document.createElement(name === "rank" ? "th" : "td");
    if (name === "rank") cell.scope = "row";
    cell.dataset.label = name;
    cell.className = TEXTS.has(name) ? `text ${name}` : name;
    cells[name] = cell;
    tr.append(cell);
  }
  const bar = document.createElement("progress");
  bar.max = 1;
  bar.setAttribute("aria-label", `Steps of rank ${rank}`);
  cells.progress.append(bar);
  const word = document.createElement("span");
  const note = document.createElement("small");
  cells.health.append(word);
  at("ranks").append(tr);
  return { cells, bar, word, note, health: "" };
}

function showRank(it, queries) {
  const row = rows.get(it.rank) ?? newRow(it.rank);
  rows.set(it.rank, row);
  const { cells, bar, word, note } = row;
  set(cells.rank, String(it.rank));
  set(cells.device, it.device);
  const share = it.tokens === null || queries === 0 ? "" : ` (${((100 * it.tokens) / queries).toFixed(1)} %)`;
  set(cells.share, it.tokens === null ? "none" : `${it.tokens.toLocaleString("en")} tokens${share}`);
  bar.value = it.done;
  set(cells.doing, it.doing);
  set(cells.computed, duration(it.compute_s));
  set(cells.waited, duration(it.wait_s));
  set(cells.copied, duration(it.copy_s));
  set(word, HEALTH[it.health] ?? it.health);
  word.className = `is ${it.health}`;
  set(note, it.note);
  if (it.note && !note.isConnected) cells.health.append(note);
  if (!it.note) note.remove();
  const tell = ["slow", "silent", "lost"];
  if (it.health !== row.health && (tell.includes(it.health) || tell.includes(row.health))) {
    say(`rank ${it.rank} is ${it.health}${it.note ? `: ${it.note}` : ""}`);
  }
  row.health = it.health;
}

function showFacts(facts) {
  const list = at("facts");
  const key = JSON.stringify(facts);
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  list.replaceChildren(...facts.map(([name, value]) => {
    const group = document.createElement("div");
    const [term, text] = [document.createElement("dt"), document.createElement("dd")];
    term.textContent = name;
    text.textContent = value;
    group.append(term, text);
    return group;
  }));
}

function show(state) {
  lastElapsed = state.elapsed_s;
  const brief = state.state === "failed" ? "The call has failed." : undefined;
  at("lost").hidden = !brief;
  if (brief) set(at("lost"), state.text);
  set(at("text"), brief ?? state.text);
  set(at("title"), state.title);
  set(at("badge"), state.state === "running" || state.state === "starting" ? "live" : state.state);
  set(at("percent"), `${Math.floor(100 * state.done)} %`);
  set(at("elapsed"), `${duration(state.elapsed_s)} since rank 0 began`);
  at("done").value = state.done;
  document.title = `${Math.floor(100 * state.done)} % ${state.state} – kyklos`;
  showFacts(state.facts);
  const queries = state.ranks.reduce((sum, rank) => sum + (rank.tokens ?? 0), 0);
  for (const rank of state.ranks) showRank(rank, queries);
  at("note").hidden = state.ranks.every((rank) => rank.compute_s !== null);
  if (state.state !== lastState) say(state.text);
  lastState = state.state;
}

/** Puts the parts of the page of `--report` below, and offers the page itself as a file. */
function showReport(text) {
  const page = new DOMParser().parseFromString(text, "text/html");
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/html" }));
  link.download = "report.html";
  link.textContent = "Save the report as a file";
  const save = document.createElement("p");
  save.append(link);
  const parts = page.querySelectorAll("header > .summary, header > .alert, header > nav, main > section");
  at("report").replaceChildren(save, ...[...parts].map((part) => document.adoptNode(part)));
}

function connect() {
  source = new EventSource("/events");
  source.addEventListener("state", (event) => show(JSON.parse(event.data)));
  source.addEventListener("report", (event) => showReport(JSON.parse(event.data)));
  source.addEventListener("end", () => {
    ended = true;
    source.close();
  });
  source.onopen = () => {
    if (at("badge").textContent === "not connected") set(at("badge"), "live");
  };
  source.onerror = () => {
    if (ended) return;
    if (at("badge").textContent !== "not connected") say("the connection to rank 0 is lost; its process may have ended");
    set(at("badge"), "not connected");
    // The browser tries again by itself, but not after an answer that is no stream.
    if (source.readyState === EventSource.CLOSED) setTimeout(connect, 3000);
  };
}

connect();
