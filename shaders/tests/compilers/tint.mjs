// Compiles every kernel that claims to run in browsers with the browsers' own compiler (Tint, in Dawn for Node.js), on
// Dawn's null backend: all of the validation of WebGPU, no GPU and no driver, nothing is executed.
//
//   node tint.mjs FOLDER DAWN        FOLDER: what write_kernels wrote; DAWN: the folder of the npm package `webgpu`
//
// Errors and warnings fail. A check that refuses nothing proves nothing: the texts in refused/ must be refused, and so
// must subgroups by a device that was not given them.

import { readFileSync, readdirSync } from 'node:fs';
import { dirname, join, resolve } from 'node:path';
import { fileURLToPath, pathToFileURL } from 'node:url';

const [folder, dawn] = process.argv.slice(2);
const { create, globals } = await import(pathToFileURL(resolve(dawn, 'index.js')));
Object.assign(globalThis, globals);
const gpu = create(['backend=null']);

// An adapter gives one device. Limits are WebGPU's defaults, whatever the adapter could do.
async function device(features) {
    const adapter = await gpu.requestAdapter();
    if (!adapter) throw new Error('Dawn has no null adapter');
    const device = await adapter.requestDevice({ requiredFeatures: features });
    device.addEventListener?.('uncapturederror', (event) => {
        console.error(`outside of every error scope: ${event.error.message}`);
        process.exitCode = 1;
    });
    return device;
}

const layouts = {
    uniform: (binding, kernel) => ({ buffer: { type: 'uniform', minBindingSize: kernel.uniform_bytes } }),
    read: () => ({ buffer: { type: 'read-only-storage' } }),
    'read-write': () => ({ buffer: { type: 'storage' } }),
    texture: ({ element }) => {
        const [, format] = element.match(/^texture_storage_2d<(\w+), read>$/);
        return { storageTexture: { access: 'read-only', format } };
    },
};

// The layout that the runtime would make, instead of one that Dawn reads off the text: that the two agree is checked.
function layout(device, kernel) {
    const entries = kernel.bindings.map((binding, index) => ({
        binding: index,
        visibility: GPUShaderStage.COMPUTE,
        ...layouts[binding.access](binding, kernel),
    }));
    return device.createPipelineLayout({ bindGroupLayouts: [device.createBindGroupLayout({ entries })] });
}

// What the compiler and the device have to say against a text.
async function complaints(device, code, entryPoint, kernel) {
    device.pushErrorScope('validation');
    const module = device.createShaderModule({ code });
    const { messages } = await module.getCompilationInfo();
    const found = messages
        .filter((message) => message.type !== 'info')
        .map((message) => `${message.lineNum}:${message.linePos} ${message.type}: ${message.message}`);
    if (!found.some((message) => message.includes(' error: '))) {
        device.createComputePipeline({
            layout: kernel ? layout(device, kernel) : 'auto',
            compute: { module, entryPoint },
        });
    }
    const error = await device.popErrorScope();
    if (error) found.push(error.message);
    return found;
}

const begun = performance.now();
const plain = await device([]);
const subgroups = await device(['subgroups']);
const kernels = JSON.parse(readFileSync(join(folder, 'index.json'), 'utf8')).filter((kernel) => kernel.in_browsers);
const text = (kernel) => readFileSync(join(folder, `${kernel.name}.tint.wgsl`), 'utf8');
const faults = [];

const counts = { plain: 0, subgroups: 0 };
for (const kernel of kernels) {
    const unknown = kernel.features.filter((feature) => feature !== 'subgroups');
    if (unknown.length) faults.push(`${kernel.name}: browsers have no feature ${unknown}`);
    const special = kernel.features.includes('subgroups');
    counts[special ? 'subgroups' : 'plain'] += 1;
    const found = await complaints(special ? subgroups : plain, text(kernel), kernel.entry_point, kernel);
    faults.push(...found.map((message) => `${kernel.name}: ${message}`));
}
if (!counts.plain || !counts.subgroups) faults.push('the index lists no kernels of one of the two sorts');

// Each control with a word of the reason for which it must be refused.
const reasons = {
    'non_uniform_barrier.wgsl': /'workgroupBarrier' must only be called from uniform control flow/,
    'barrier_after_stored_bound.wgsl': /'workgroupBarrier' must only be called from uniform control flow/,
    'non_uniform_subgroup.wgsl': /'subgroupAdd' must only be called from subgroup uniform control flow/,
    'too_much_workgroup_memory.wgsl': /workgroup storage/i,
};
const refused = join(dirname(fileURLToPath(import.meta.url)), 'refused');
let controls = 0;
async function control(name, device, code, reason) {
    const found = await complaints(device, code, 'main');
    if (!found.some((message) => reason?.test(message))) {
        faults.push(`control ${name} was not refused for ${reason}; said was: ${found.join('; ') || 'nothing'}`);
    }
    controls += 1;
}
const files = readdirSync(refused).sort();
if (files.join() !== Object.keys(reasons).sort().join()) faults.push(`refused/ and the reasons differ: ${files}`);
for (const file of files) {
    const code = readFileSync(join(refused, file), 'utf8');
    await control(file, code.startsWith('enable subgroups;') ? subgroups : plain, code, reasons[file]);
}
const special = kernels.find((kernel) => kernel.features.includes('subgroups'));
if (special) await control(`${special.name} without subgroups`, plain, text(special), /subgroups/);

for (const fault of faults.slice(0, 20)) console.error(`tint: ${fault}`);
if (faults.length > 20) console.error(`tint: and ${faults.length - 20} more`);
console.log(
    `tint: ${counts.plain} kernels on a device without features, ${counts.subgroups} on one with subgroups, ` +
        `${controls} controls, ${faults.length} faults, ${((performance.now() - begun) / 1000).toFixed(1)} s`,
);
// Dawn's own threads would keep the process alive.
process.exit(faults.length ? 1 : (process.exitCode ?? 0));
