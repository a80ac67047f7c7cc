// Plain attention for comparison: scores to memory, softmax over each row, then times V. One head at a time, so that the
// scores need 4 bytes for each pair of tokens. It has a device of its own.

const WGSL = `
struct Sizes { tokens: u32, heads: u32, kv_heads: u32, dim: u32, head: u32, left: i32, right: i32, scale: f32 }
@group(0) @binding(0) var<uniform> sizes: Sizes;
@group(0) @binding(1) var<storage, read> q: array<f32>;
@group(0) @binding(2) var<storage, read> k: array<f32>;
@group(0) @binding(3) var<storage, read> v: array<f32>;
@group(0) @binding(4) var<storage, read_write> scores: array<f32>;
@group(0) @binding(5) var<storage, read_write> result: array<f32>;

const HIDDEN = -3.4e38;

// -1 is no bound.
fn visible(row: u32, key: u32) -> bool {
  let distance = i32(row) - i32(key);
  return (sizes.left < 0 || distance <= sizes.left) && (sizes.right < 0 || -distance <= sizes.right);
}

fn kv_row(key: u32) -> u32 {
  return (key * sizes.kv_heads + sizes.head / (sizes.heads / sizes.kv_heads)) * sizes.dim;
}

@compute @workgroup_size(16, 16)
fn score(@builtin(global_invocation_id) id: vec3u) {
  if (id.x >= sizes.tokens || id.y >= sizes.tokens) { return; }
  let pair = id.y * sizes.tokens + id.x;
  if (!visible(id.y, id.x)) { scores[pair] = HIDDEN; return; }
  let query = (id.y * sizes.heads + sizes.head) * sizes.dim;
  let key = kv_row(id.x);
  var sum = 0.0;
  for (var i = 0u; i < sizes.dim; i++) { sum += q[query + i] * k[key + i]; }
  scores[pair] = sum * sizes.scale;
}

var<workgroup> part: array<f32, 64>;

@compute @workgroup_size(64)
fn softmax(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) lane: u32) {
  let row = group.x * sizes.tokens;
  var largest = HIDDEN;
  for (var i = lane; i < sizes.tokens; i += 64u) { largest = max(largest, scores[row + i]); }
  part[lane] = largest;
  workgroupBarrier();
  for (var half = 32u; half > 0u; half /= 2u) {
    if (lane < half) { part[lane] = max(part[lane], part[lane + half]); }
    workgroupBarrier();
  }
  largest = part[0];
  workgroupBarrier();
  var sum = 0.0;
  for (var i = lane; i < sizes.tokens; i += 64u) {
    let weight = select(0.0, exp(scores[row + i] - largest), scores[row + i] > HIDDEN);
    scores[row + i] = weight;
    sum += weight;
  }
  part[lane] = sum;
  workgroupBarrier();
  for (var half = 32u; half > 0u; half /= 2u) {
    if (lane < half) { part[lane] += part[lane + half]; }
    workgroupBarrier();
  }
  sum = part[0];
  for (var i = lane; i < sizes.tokens; i += 64u) { scores[row + i] /= sum; }
  if (lane == 0u) {
    result[sizes.tokens * sizes.heads * sizes.dim + group.x * sizes.heads + sizes.head] = largest + log(sum);
  }
}

@compute @workgroup_size(16, 16)
fn values(@builtin(global_invocation_id) id: vec3u) {
  if (id.x >= sizes.dim || id.y >= sizes.tokens) { return; }
  var sum = 0.0;
  for (var key = 0u; key < sizes.tokens; key++) { sum += scores[id.y * sizes.tokens + key] * v[kv_row(key) + id.x]; }
  result[(id.y * sizes.heads + sizes.head) * sizes.dim + id.x] = sum;
}`;

// Runs it `repetitions` times and once more before: { o, lse, wallMs }, from the first command until the result is in the
// host's memory. `left` and `right` bound the keys that a query sees; -1 is no bound.
export async function twoPass({ tokens, heads, kvHeads, dim, left, right, q, k, v }, repetitions) {
  const adapter = await navigator.gpu.requestAdapter();
  if (!adapter) throw new Error("the browser gives no second device");
  const device = await adapter.requestDevice();
  try {
    const scoreBytes = tokens * tokens * 4;
    const limit = device.limits.maxStorageBufferBindingSize;
    if (scoreBytes > limit) {
      throw new Error(`its scores need ${scoreBytes} bytes, and a binding of this device has at most ${limit}`);
    }
    device.pushErrorScope("validation");
    device.pushErrorScope("out-of-memory");
    const { STORAGE, UNIFORM, COPY_DST, COPY_SRC, MAP_READ } = GPUBufferUsage;
    const upload = (data, usage) => {
      const buffer = device.createBuffer({ size: data.byteLength, usage: usage | COPY_DST });
      device.queue.writeBuffer(buffer, 0, data);
      return buffer;
    };
    const inputs = [q, k, v].map((tensor) => upload(tensor, STORAGE));
    const scores = device.createBuffer({ size: scoreBytes, usage: STORAGE });
    const oLength = tokens * heads * dim;
    const size = (oLength + tokens * heads) * 4;
    const result = device.createBuffer({ size, usage: STORAGE | COPY_SRC });
    const back = device.createBuffer({ size, usage: MAP_READ | COPY_DST });
    const module = device.createShaderModule({ code: WGSL });
    const buffer = (type) => ({ visibility: GPUShaderStage.COMPUTE, buffer: { type } });
    const types = ["uniform", "read-only-storage", "read-only-storage", "read-only-storage", "storage", "storage"];
    const layout = device.createBindGroupLayout({
      entries: types.map((type, binding) => ({ binding, ...buffer(type) })),
    });
    const pipelines = await Promise.all(["score", "softmax", "values"].map((entryPoint) =>
      device.createComputePipelineAsync({
        layout: device.createPipelineLayout({ bindGroupLayouts: [layout] }),
        compute: { module, entryPoint },
      })));
    const bindings = Array.from({ length: heads }, (_, head) => {
      const sizes = new DataView(new ArrayBuffer(32));
      [tokens, heads, kvHeads, dim, head].forEach((value, index) => sizes.setUint32(index * 4, value, true));
      sizes.setInt32(20, left, true);
      sizes.setInt32(24, right, true);
      sizes.setFloat32(28, 1 / Math.sqrt(dim), true);
      const buffers = [upload(sizes, UNIFORM), ...inputs, scores, result];
      return device.createBindGroup({
        layout,
        entries: buffers.map((buffer, binding) => ({ binding, resource: { buffer } })),
      });
    });
    const memory = await device.popErrorScope();
    if (memory) throw new Error("out of memory on the device");
    const groups = [[tokens / 16, tokens / 16], [tokens, 1], [dim / 16, tokens / 16]];
    const wallMs = [];
    let numbers;
    for (let round = 0; round <= repetitions; round++) {
      await device.queue.onSubmittedWorkDone();
      const start = performance.now();
      const encoder = device.createCommandEncoder();
      const pass = encoder.beginComputePass();
      for (const binding of bindings) {
        pass.setBindGroup(0, binding);
        pipelines.forEach((pipeline, index) => {
          pass.setPipeline(pipeline);
          pass.dispatchWorkgroups(...groups[index].map(Math.ceil));
        });
      }
      pass.end();
      encoder.copyBufferToBuffer(result, 0, back, 0, size);
      device.queue.submit([encoder.finish()]);
      await back.mapAsync(GPUMapMode.READ);
      numbers = new Float32Array(back.getMappedRange().slice(0));
      back.unmap();
      if (round > 0) wallMs.push(performance.now() - start);
    }
    const wrong = await device.popErrorScope();
    if (wrong) throw new Error(wrong.message);
    return { o: numbers.subarray(0, oLength), lse: numbers.subarray(oLength), wallMs };
  } finally {
    device.destroy();
  }
}
