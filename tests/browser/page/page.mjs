// In the page: looks over WebGPU's shoulder, and offers the claims to whoever drives the page.
import init, { claims, check } from "./kyklos_browser.js";

// What must not happen behind the program's back: shader messages. Errors that nobody handles are on the console.
const complaints = [];
// Bytes of each buffer and texture that is there.
const live = new Map();
let device = null;
let mappingRefused = false;

function wrap(type, name, around) {
  const original = type.prototype[name];
  type.prototype[name] = function (...args) {
    return around.call(this, (...given) => original.apply(this, given), args);
  };
}

wrap(GPUDevice, "createShaderModule", function (create, [descriptor]) {
  const module = create(descriptor);
  module.getCompilationInfo().then(({ messages }) => {
    for (const { type, message, lineNum } of messages) {
      if (type !== "info") complaints.push(`${descriptor.label}, line ${lineNum}: ${type}: ${message}`);
    }
  });
  return module;
});
wrap(GPUDevice, "createBuffer", function (create, [descriptor]) {
  if (mappingRefused && descriptor.mappedAtCreation) throw new RangeError("createBuffer: no memory to map");
  const buffer = create(descriptor);
  live.set(buffer, buffer.size);
  return buffer;
});
wrap(GPUBuffer, "destroy", function (destroy) {
  live.delete(this);
  return destroy();
});
// A device with the limits that every browser gives, whatever is asked for.
const defaultLimits = new URLSearchParams(location.search).get("limits") === "default";
wrap(GPUAdapter, "requestDevice", async function (request, [descriptor]) {
  device = await request(defaultLimits ? { ...descriptor, requiredLimits: {} } : descriptor);
  return device;
});

globalThis.liveBytes = () => [...live.values()].reduce((sum, bytes) => sum + bytes, 0);
globalThis.refuseMapping = (refuse) => (mappingRefused = refuse);
globalThis.largestBuffer = () => device.limits.maxBufferSize;

globalThis.kyklos = {
  async adapter() {
    const adapter = await navigator.gpu?.requestAdapter();
    if (!adapter) return null;
    const { vendor, architecture, description, isFallbackAdapter } = adapter.info;
    const name = [vendor, architecture, description].filter(Boolean).join(" ");
    return isFallbackAdapter ? `${name}, in software` : name;
  },
  claims,
  async check(claim, all) {
    const told = await check(claim, all);
    return { told, complaints: complaints.splice(0) };
  },
};
globalThis.kyklosReady = init();
