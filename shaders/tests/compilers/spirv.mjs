// Checks the SPIR-V of every kernel against the rules of the Vulkan that it may meet first, with spirv-val.
//
//   node spirv.mjs FOLDER SPIRV_VAL      FOLDER: what write_kernels wrote; SPIRV_VAL: the program
//
// A check that refuses nothing proves nothing: two broken modules must be refused.

import { spawn } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { availableParallelism } from 'node:os';
import { join } from 'node:path';

const [folder, program] = process.argv.slice(2);

const HEADER_WORDS = 5;
const OP_TYPE_ARRAY = 28;
const OP_DECORATE = 71;
const DECORATION_BLOCK = 2;
const DECORATION_ARRAY_STRIDE = 6;

function read(name) {
    const bytes = readFileSync(join(folder, `${name}.spv`));
    return new Uint32Array(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length));
}

function* instructions(words) {
    for (let at = HEADER_WORDS; at < words.length; ) {
        const length = words[at] >>> 16;
        if (length === 0) throw new Error('an instruction of no words');
        yield { opcode: words[at] & 0xffff, at, length };
        at += length;
    }
}

function without(words, unwanted) {
    const kept = new Uint32Array(words.length);
    kept.set(words.subarray(0, HEADER_WORDS));
    let end = HEADER_WORDS;
    for (const one of instructions(words)) {
        if (unwanted(one)) continue;
        kept.set(words.subarray(one.at, one.at + one.length), end);
        end += one.length;
    }
    return kept.subarray(0, end);
}

// naga gives every array a stride, also those in workgroup memory, where Vulkan wants none; drivers ignore it there.
// spirv-val stops at the first fault, so this one, which is not in the kernels, would hide all others. Our uniform
// structs hold no arrays and our storage arrays are unsized: if one of those needed its stride, spirv-val would say so.
function withoutStrides(words) {
    const sized = new Set();
    for (const { opcode, at } of instructions(words)) if (opcode === OP_TYPE_ARRAY) sized.add(words[at + 1]);
    return without(
        words,
        ({ opcode, at }) =>
            opcode === OP_DECORATE && words[at + 2] === DECORATION_ARRAY_STRIDE && sized.has(words[at + 1]),
    );
}

// What spirv-val has to say against a module; nothing where it is valid.
function complaint(words, target) {
    return new Promise((resolve, reject) => {
        const child = spawn(program, ['--target-env', target, '-'], { stdio: ['pipe', 'pipe', 'pipe'] });
        let said = '';
        for (const stream of [child.stdout, child.stderr]) stream.on('data', (data) => (said += data));
        child.on('error', reject);
        // It may end before it has read everything; its exit status tells.
        child.stdin.on('error', () => {});
        child.on('close', (status) => resolve(status === 0 && !said ? '' : said.trim() || `exit status ${status}`));
        child.stdin.end(Buffer.from(words.buffer, words.byteOffset, words.byteLength));
    });
}

const begun = performance.now();
const kernels = JSON.parse(readFileSync(join(folder, 'index.json'), 'utf8'));
const faults = [];
const counts = {};

const waiting = [...kernels];
async function worker() {
    for (let kernel = waiting.shift(); kernel; kernel = waiting.shift()) {
        counts[kernel.vulkan] = (counts[kernel.vulkan] ?? 0) + 1;
        const said = await complaint(withoutStrides(read(kernel.name)), kernel.vulkan);
        if (said) faults.push(`${kernel.name}: ${said}`);
    }
}
await Promise.all(Array.from({ length: availableParallelism() }, worker));
if (kernels.length === 0) faults.push('the index lists no kernels');

let controls = 0;
async function control(name, words, target, reason) {
    const said = await complaint(words, target);
    if (!reason.test(said)) faults.push(`control ${name} was not refused for ${reason}; said was: ${said || 'nothing'}`);
    controls += 1;
}
const subject = kernels.find((kernel) => kernel.workgroup_bytes > 0 && kernel.features.length === 0);
const words = read(subject.name);
const clean = withoutStrides(words);
await control('module without its end', clean.subarray(0, clean.length - 1), subject.vulkan, /OpFunctionEnd/);
await control(
    'buffers that are no blocks',
    without(clean, ({ opcode, at }) => opcode === OP_DECORATE && clean[at + 2] === DECORATION_BLOCK),
    subject.vulkan,
    /Block/,
);
// If this one passes, naga or the rule has changed: leave `withoutStrides` out from then on.
await control('stride in workgroup memory', words, subject.vulkan, /10684/);

for (const fault of faults.slice(0, 20)) console.error(`spirv-val: ${fault}`);
if (faults.length > 20) console.error(`spirv-val: and ${faults.length - 20} more`);
console.log(
    `spirv-val: ${Object.entries(counts)
        .map(([target, count]) => `${count} kernels for ${target}`)
        .join(', ')}, ${controls} controls, ${faults.length} faults, ${((performance.now() - begun) / 1000).toFixed(1)} s`,
);
process.exitCode = faults.length ? 1 : 0;
