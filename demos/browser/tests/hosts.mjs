// What the checks of tabs share: the command that waits for tabs, a tab that lends its GPU, and what both say.
import assert from "node:assert/strict";
import { spawn } from "node:child_process";

export const words = (text) => text.split(" ").filter(Boolean);

/// Starts the command, which prints links to tabs.
export function start(kyklos, args) {
  const child = spawn(kyklos, args, { stdio: ["ignore", "pipe", "pipe"] });
  const interrupt = () => child.exitCode ?? child.kill("SIGINT");
  process.once("exit", interrupt);
  const said = { out: "", err: "" };
  child.stdout.on("data", (chunk) => { said.out += chunk; });
  child.stderr.on("data", (chunk) => { said.err += chunk; });
  const ended = new Promise((done) => child.on("close", done)).then(() => process.off("exit", interrupt));
  const until = async (what, look) => {
    for (let tries = 0; tries < 1200; tries += 1) {
      const found = look();
      if (found) return found;
      if (child.exitCode !== null) break;
      await new Promise((next) => setTimeout(next, 100));
    }
    child.kill("SIGKILL");
    throw new Error(`${what} did not come: ${said.err}`);
  };
  // Its exit code.
  const end = async () => {
    const timer = setTimeout(() => child.kill("SIGKILL"), 150000);
    await ended;
    clearTimeout(timer);
    return child.exitCode;
  };
  return {
    links: (count) => until("a link", () => {
      const links = said.err.match(/https?:\/\/\S+#\S+&token=[0-9a-f]{32}/g) ?? [];
      return links.length >= count && links;
    }),
    words: () => said.err,
    interrupt,
    end,
    report: async () => {
      await end();
      const json = said.out.slice(said.out.indexOf("{"));
      try {
        return JSON.parse(json);
      } catch {
        throw new Error(`no report: ${said.out}${said.err}`);
      }
    },
  };
}

/// A tab at this link.
export async function open(browser, link) {
  const page = await browser.newPage({ viewport: { width: 800, height: 700 } });
  await page.goto(link);
  return page;
}

/// A tab whose button was pressed.
export async function lend(browser, link) {
  const page = await open(browser, link);
  await page.waitForSelector("#lend:not([disabled])", { timeout: 60000 });
  await page.focus("#lend");
  await page.keyboard.press("Enter");
  return page;
}

/// Waits until the page says it.
export async function says(page, expected) {
  const fits = typeof expected === "string" ? (text) => text === expected : (text) => expected.test(text);
  let text = "";
  for (let tries = 0; tries < 600; tries += 1) {
    text = await page.textContent("#status");
    if (fits(text)) return;
    await new Promise((next) => setTimeout(next, 100));
  }
  assert.fail(`the page says "${text}"`);
}

/// Until the tab has got its tensors and sends results.
export async function busy(page) {
  await page.waitForFunction(() => parseFloat(document.querySelector("#sent").textContent) > 1, null, { timeout: 60000 });
}

/// The result is right, and of so many ranks.
export function exact(report, ranks) {
  assert(report.max_abs_error <= report.tolerance, JSON.stringify(report));
  assert.equal(report.per_rank.length, ranks);
}
