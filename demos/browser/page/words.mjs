// What both pages say.
export const NO_ADAPTER = "This browser knows WebGPU but offers no adapter: its GPU or driver is not supported, or WebGPU is turned " +
  "off. Chromium on Linux may need the flag --enable-unsafe-webgpu.";
