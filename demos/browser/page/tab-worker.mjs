// Lends the GPU of this tab to a rank: opens the device and the connection, and moves bytes between them.
import init, { TabDevice, protocolVersion } from "./kyklos_page.js";

const tell = (kind, more = {}) => postMessage({ kind, ...more });
// Without a full stop: the page writes one.
const bare = (error) => String(error?.message ?? error).replace(/\.$/, "");
const moved = { received: 0, sent: 0 };

onmessage = async ({ data }) => {
  try {
    tell("end", { reason: await lend(data) });
  } catch (error) {
    tell("failed", { reason: bare(error) });
  }
};

async function lend({ version, addresses, cert, token, memory }) {
  await init();
  if (version !== protocolVersion()) {
    throw new Error(`the link has version ${version} of the protocol, this page has ${protocolVersion()}: use the page ` +
      "of the host's release");
  }
  // The device first: a link works once.
  let write = null;
  const waiting = [];
  const send = (bytes) => (write ? write(bytes) : waiting.push(bytes));
  const device = await TabDevice.open(token, memory, send);
  const name = device.name;
  const work = device.run();
  const connection = await connect(addresses, cert);
  const stream = await connection.createBidirectionalStream();
  const writer = stream.writable.getWriter();
  write = (bytes) => {
    moved.sent += bytes.length;
    writer.write(bytes).catch(() => {}); // The reader tells of the end.
  };
  waiting.forEach(write);
  tell("connected", { name });
  const report = setInterval(() => tell("moved", moved), 500);
  const lost = read(stream.readable.getReader(), device).then(() => null, (error) => error);
  try {
    return await work;
  } catch (error) {
    if (!bare(error).startsWith("the connection to the host has ended")) throw error;
    throw new Error(`the connection to the host is lost: ${bare((await lost) ?? "it has ended it")}`);
  } finally {
    clearInterval(report);
    tell("moved", moved);
    connection.close();
  }
}

async function read(reader, device) {
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      moved.received += value.length;
      await device.push(value);
    }
  } finally {
    device.close();
  }
}

// The first address that answers.
async function connect(addresses, cert) {
  let last = null;
  for (const address of addresses) {
    const connection = new WebTransport(`https://${address}/`, {
      serverCertificateHashes: [{ algorithm: "sha-256", value: cert }],
    });
    connection.closed.catch(() => {});
    try {
      await connection.ready;
      return connection;
    } catch (error) {
      last = error;
    }
  }
  throw new Error(`the host does not answer at ${addresses.join(", ")}: it has ended, or a firewall is between (${bare(last)})`);
}
