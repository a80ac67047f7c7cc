//! Attention for drivers that compute on the host's cores: one subgroup is one workgroup, and one
//! SIMD register there.
//!
//! Each lane keeps whole query rows in named registers, and all lanes go through the same keys. The
//! subgroup loads a key's row together: lane l loads units l, l + size, … Then each element is
//! broadcast from a constant lane, which is one shuffle. There is no workgroup memory, no barrier,
//! no private array and no branch in the loop over keys. On such drivers each of these costs more
//! than the arithmetic it could save. For the same reason the rescaling is unconditional.
//!
//! K and V are textures of 16-byte texels: x = KV head · units of a head + unit, y = (batch entry −
//! `batch_first`) · `k_batch` + key − `key_begin` (`v_batch` for v; their other offsets and strides
//! are not used). These drivers read a texel in a few instructions, but turn a load from a buffer
//! into a loop over lanes and components that goes through memory: 20 times slower without AVX-512.

use crate::BiasInput;
use crate::text::Text;
use crate::variant::AttendKernel;

/// Keys in which the work list counts: a multiple of the keys of one iteration of the loop over
/// full runs.
pub(crate) const KV_COLS: u32 = 32;

/// Workgroup memory where a mask tensor is read.
pub(crate) const VISIBLE_BYTES: u32 = 4;

const COMPONENTS: [&str; 4] = ["x", "y", "z", "w"];

pub(crate) fn source(kernel: AttendKernel, lanes: u32, rows: u32) -> String {
    let shape = Shape {
        kernel,
        lanes,
        rows,
        chunks: kernel.head_dim / 4,
        units: kernel.head_dim / kernel.storage.unit_elements(),
        keys_at_once: keys_at_once(kernel.head_dim),
    };
    let mut t = Text::default();
    t.line(format!(
        "// attend, subgroup broadcast, {}, head dim {}: subgroups of {lanes}, {rows} query rows in each lane",
        kernel.storage.name(),
        kernel.head_dim
    ));
    t.lines(&super::kernel_prelude(kernel));
    t.line("");
    t.lines(kernel.storage.texel_functions());
    t.line("");
    if kernel.bias == BiasInput::Visible {
        t.lines(PAIR_BITS);
        t.line("");
        t.line("var<workgroup> seen_from: u32;");
        t.line("");
    }
    t.line(format!("@compute @workgroup_size({lanes})"));
    t.block(
        "fn main(@builtin(workgroup_id) group_id: vec3<u32>, @builtin(subgroup_invocation_id) lane: u32)",
        |t| {
            super::item(t);
            shape.begin(t);
            super::all_runs(t, kernel.bias, |t, partial| match (partial, kernel.bias) {
                (false, _) => shape.keys(t, "first", "end", shape.keys_at_once, false),
                (true, BiasInput::None | BiasInput::Bias) => shape.keys(t, "first", "end", 1, true),
                (true, BiasInput::Visible) => shape.seen_groups(t),
            });
            shape.end(t);
        },
    );
    t.finish()
}

/// Keys in one iteration of the loop over full runs.
const fn keys_at_once(head_dim: u32) -> u32 {
    if head_dim <= 256 { 2 } else { 1 }
}

/// Independent sums in a logit, so that additions overlap. They depend on nothing but the head dim:
/// every loop of this kernel and of the backward kernels rounds the logit of a pair alike, so
/// weights fit the log-sum-exp.
pub(crate) const fn chains(head_dim: u32) -> u32 {
    if head_dim <= 128 { 2 } else { 4 }
}

/// The parameters on which the text depends.
struct Shape {
    kernel: AttendKernel,
    lanes: u32,
    /// Query rows of a lane.
    rows: u32,
    /// Chunks of 4 elements in a head.
    chunks: u32,
    /// 16-byte units in a head.
    units: u32,
    /// Keys in one iteration of the loop over full runs.
    keys_at_once: u32,
}

impl Shape {
    /// Rows, spans, Q and the state.
    fn begin(&self, t: &mut Text) {
        for load in 0..self.loads() {
            // Lanes beyond the head load its last unit again; no other lane reads it from them.
            t.line(format!(
                "let unit{load} = kv_head * {}u + min(lane + {}u, {}u);",
                self.units,
                load * self.lanes,
                self.units - 1
            ));
        }
        t.line("let k_y = (batch - params.batch_first) * params.k_batch - params.key_begin;");
        t.line("let v_y = (batch - params.batch_first) * params.v_batch - params.key_begin;");
        for r in 0..self.rows {
            t.lines(&format!(
                "let row{r} = tile * {}u + {}u + lane;
let in{r} = row{r} < params.rows;
let safe{r} = min(row{r}, params.rows - 1u);
let lo{r} = positions[spans + 2u * safe{r}];
let hi{r} = positions[spans + 2u * safe{r} + 1u];
let q_at{r} = params.q_offset + batch * params.q_batch + safe{r} * params.q_row + head * params.q_head;
let a_at{r} = params.a_offset + ((batch * params.rows + safe{r}) * params.heads + head) * {}u;
let ml_at{r} = params.ml_offset + (batch * params.heads + head) * params.rows + safe{r};
var m{r} = EMPTY_M;
var l{r} = 0.0f;
var seen{r} = {};",
                self.lanes * self.rows,
                self.lanes * r,
                self.chunks,
                super::seen_at_first(self.kernel.bias)
            ));
            if self.kernel.bias.any() {
                t.line(format!("let bias_row{r} = {};", super::bias_row(&format!("safe{r}"))));
            }
            for u in 0..self.units {
                t.line(format!("let q_unit{r}_{u} = q[q_at{r} + {u}u];"));
                for half in 0..self.unit_chunks() {
                    let c = u * self.unit_chunks() + half;
                    t.line(format!("let q{r}_{c} = chunk_{half}(q_unit{r}_{u}) * params.q_scale;"));
                }
            }
            for c in 0..self.chunks {
                for component in COMPONENTS {
                    t.line(format!("var a{r}_{c}{component} = 0.0f;"));
                }
            }
        }
    }

    /// The keys of one run, 32 at a time. First the visible keys of each row become the bits of a
    /// word; if no row sees any of the 32 keys, none is loaded. Loads dominate the cost: for
    /// consecutive keys the bits are two words of a row.
    fn seen_groups(&self, t: &mut Text) {
        t.block(format!("for (var group = first; group < end; group += {KV_COLS}u)"), |t| {
            t.lines(&format!(
                "let group_end = min(group + {KV_COLS}u, end);
let base = positions[params.keys_at + group];
var consecutive = true;
for (var i = group + lane; i < group_end; i += {}u) {{
    consecutive = consecutive && positions[params.keys_at + i] == base + (i - group);
}}",
                self.lanes
            ));
            for r in 0..self.rows {
                t.line(format!("var bits{r} = 0u;"));
            }
            t.line("let word_only = subgroupAll(consecutive);");
            t.block("if (word_only)", |t| {
                t.line("let inside = ones(group_end - group);");
                for r in 0..self.rows {
                    t.line(format!(
                        "bits{r} = inside & span_bits(lo{r}, hi{r}, base) & \
                         bias_bits(bias_row{r}, base, group_end - group);"
                    ));
                }
            });
            t.block("for (var i = select(group, group_end, word_only); i < group_end; i++)", |t| {
                t.line("let position = positions[params.keys_at + i];");
                for r in 0..self.rows {
                    t.line(format!(
                        "bits{r} |= select(0u, 1u << (i - group), lo{r} <= position && position < hi{r} && \
                         shows(bias_term(bias_row{r}, position)));"
                    ));
                }
            });
            let any = (0..self.rows).map(|r| format!("bits{r}")).collect::<Vec<_>>().join(" | ");
            t.lines(&format!(
                "let any_seen = subgroupAny(({any}) != 0u);
if (lane == 0u) {{ seen_from = select(group_end, group, any_seen); }}
// Through workgroup memory, because browsers count what subgroups agree on as different in every lane.
let group_first = workgroupUniformLoad(&seen_from);"
            ));
            self.keys(t, "group_first", "group_end", 1, true);
        });
    }

    /// The keys of `first..end`, `at_once` of them in each iteration of the loop.
    ///
    /// Written component by component, so that few values are alive at a time: values that do not
    /// fit the processor's registers go through memory, which costs more than the arithmetic.
    fn keys(&self, t: &mut Text, first: &str, end: &str, at_once: u32, partial: bool) {
        t.block(format!("for (var key = {first}; key < {end}; key += {at_once}u)"), |t| {
            for j in 0..at_once {
                self.fetch(t, "k", j);
            }
            let chains = chains(self.kernel.head_dim);
            for c in 0..self.chunks {
                for (x, component) in COMPONENTS.iter().enumerate() {
                    let chain = (4 * c + x as u32) % chains;
                    for j in 0..at_once {
                        t.line(format!(
                            "let k{j}_{c}{component} = {};",
                            self.broadcast("k", j, c, component)
                        ));
                    }
                    for r in 0..self.rows {
                        for j in 0..at_once {
                            let s = format!("s{r}_{j}_{chain}");
                            if 4 * c + (x as u32) < chains {
                                t.line(format!("var {s} = q{r}_{c}.{component} * k{j}_{c}{component};"));
                            } else {
                                t.line(format!("{s} = fma(q{r}_{c}.{component}, k{j}_{c}{component}, {s});"));
                            }
                        }
                    }
                }
            }
            if partial && self.kernel.bias != BiasInput::Visible {
                t.line("let position = positions[params.keys_at + key];");
            }
            for r in 0..self.rows {
                self.weights(t, at_once, partial, r);
            }
            for j in 0..at_once {
                self.fetch(t, "v", j);
            }
            for c in 0..self.chunks {
                for component in COMPONENTS {
                    for j in 0..at_once {
                        t.line(format!(
                            "let v{j}_{c}{component} = {};",
                            self.broadcast("v", j, c, component)
                        ));
                    }
                    for r in 0..self.rows {
                        let a = format!("a{r}_{c}{component}");
                        let sum = (0..at_once).fold(format!("{a} * corr{r}"), |sum, j| {
                            let value = if partial {
                                format!("select(0.0f, v{j}_{c}{component}, vis{r})")
                            } else {
                                format!("v{j}_{c}{component}")
                            };
                            format!("fma({value}, p{r}_{j}, {sum})")
                        });
                        t.line(format!("{a} = {sum};"));
                    }
                }
            }
        });
    }

    /// Logits, maximum and weights of one row.
    fn weights(&self, t: &mut Text, at_once: u32, partial: bool, r: u32) {
        for j in 0..at_once {
            let sum = (0..chains(self.kernel.head_dim))
                .map(|chain| format!("s{r}_{j}_{chain}"))
                .collect::<Vec<_>>()
                .join(" + ");
            t.line(format!("let dot{r}_{j} = ({sum}) * params.x_scale;"));
            let logit =
                if self.kernel.softcap { format!("capped(dot{r}_{j})") } else { format!("dot{r}_{j}") };
            if partial {
                let span = format!("lo{r} <= position && position < hi{r}");
                let logit = match self.kernel.bias {
                    BiasInput::None => {
                        t.line(format!("let vis{r} = {span};"));
                        logit
                    }
                    BiasInput::Visible => {
                        t.line(format!("let vis{r} = ((bits{r} >> (key - group)) & 1u) == 1u;"));
                        logit
                    }
                    BiasInput::Bias => {
                        t.line(format!("let term{r} = bias_term(bias_row{r}, position);"));
                        t.line(format!("let vis{r} = {span} && shows(term{r});"));
                        format!("{logit} + term{r}")
                    }
                };
                t.line(format!("let x{r}_{j} = select(EMPTY_M, {logit}, vis{r});"));
                t.line(format!("seen{r} = seen{r} || vis{r};"));
            } else {
                t.line(format!("let x{r}_{j} = {logit};"));
            }
        }
        let max = (0..at_once).fold(format!("m{r}"), |max, j| format!("max({max}, x{r}_{j})"));
        t.line(format!("let n{r} = {max};"));
        t.line(format!("let corr{r} = weight_of(m{r} - n{r});"));
        for j in 0..at_once {
            if partial {
                t.line(format!("let p{r}_{j} = select(0.0f, weight_of(x{r}_{j} - n{r}), vis{r});"));
            } else {
                t.line(format!("let p{r}_{j} = weight_of(x{r}_{j} - n{r});"));
            }
        }
        t.line(format!("m{r} = n{r};"));
        let sum = (0..at_once).map(|j| format!("p{r}_{j}")).collect::<Vec<_>>().join(" + ");
        t.line(format!("l{r} = fma(l{r}, corr{r}, {sum});"));
    }

    /// Writes the state of rows that saw a key.
    fn end(&self, t: &mut Text) {
        for r in 0..self.rows {
            t.block(format!("if (in{r} && seen{r})"), |t| {
                t.lines(&format!(
                    "let ml = state_ml[ml_at{r}];
let top = max(ml.x, m{r});
let keep = weight_of(ml.x - top);
let found = weight_of(m{r} - top);"
                ));
                for c in 0..self.chunks {
                    let [x, y, z, w] = COMPONENTS.map(|component| format!("a{r}_{c}{component}"));
                    let (at, sums) = (format!("a_at{r} + {c}u"), format!("vec4<f32>({x}, {y}, {z}, {w})"));
                    t.line(format!("state_a[{at}] = state_a[{at}] * keep + {sums} * found;"));
                }
                t.line(format!("state_ml[ml_at{r}] = vec2<f32>(top, ml.y * keep + l{r} * found);"));
            });
        }
    }

    /// Loads the row of key `key + j`: this lane's units, unpacked before they are broadcast.
    /// Coordinates are signed: where naga has to clamp unsigned coordinates itself, it makes
    /// invalid SPIR-V.
    fn fetch(&self, t: &mut Text, tensor: &str, j: u32) {
        for load in 0..self.loads() {
            t.line(format!(
                "let {tensor}{j}_unit{load} = \
                 textureLoad({tensor}, vec2<i32>(vec2<u32>(unit{load}, {tensor}_y + key + {j}u)));"
            ));
            for half in 0..self.unit_chunks() {
                t.line(format!("let {tensor}{j}_own{load}_{half} = texel_{half}({tensor}{j}_unit{load});"));
            }
        }
    }

    /// Chunk `c` of the loaded row, in every lane.
    fn broadcast(&self, tensor: &str, j: u32, c: u32, component: &str) -> String {
        let unit = c / self.unit_chunks();
        format!(
            "subgroupBroadcast({tensor}{j}_own{}_{}.{component}, {}u)",
            unit / self.lanes,
            c % self.unit_chunks(),
            unit % self.lanes
        )
    }

    fn loads(&self) -> u32 {
        self.units.div_ceil(self.lanes)
    }

    fn unit_chunks(&self) -> u32 {
        self.kernel.storage.unit_chunks()
    }
}

/// The visibility of up to 32 keys at consecutive positions for a row, as the low bits of a word.
const PAIR_BITS: &str = "fn ones(count: u32) -> u32 { return select((1u << (count & 31u)) - 1u, 0xffffffffu, count >= 32u); }
// Bit i: lo <= base + i < hi.
fn span_bits(lo: u32, hi: u32, base: u32) -> u32 { return ones(max(hi, base) - base) & ~ones(max(lo, base) - base); }
// Bits base `count` on mean nothing.
fn bias_bits(row: u32, base: u32, count: u32) -> u32 {
    let shift = base & 31u;
    let low = bias[row + (base >> 5u)] >> shift;
    let high = bias[row + ((base + count - 1u) >> 5u)] << ((32u - shift) & 31u);
    return low | select(high, 0u, shift == 0u);
}";
