//! Attention for drivers that compute on the host's cores: one subgroup is one workgroup, and one SIMD register there.
//!
//! Each lane carries whole query rows in named registers, all lanes walk the same keys. A key's row is fetched by the
//! subgroup together, lane l taking units l, l + size, …, and each chunk is then broadcast from a constant lane: such
//! drivers turn a load into a loop over the lanes whatever the addresses are, and a broadcast into one shuffle. There
//! is no workgroup memory, no barrier, no private array and no branch in the loop, each of which costs more there than
//! the arithmetic it could save; hence also the unconditional rescaling.

use crate::kernel::AttendKernel;
use crate::text::Text;

/// Keys in which the work list counts; the kernel takes them one by one.
pub(crate) const KV_COLS: u32 = 32;

pub(crate) fn source(kernel: AttendKernel, lanes: u32, rows: u32) -> String {
    let shape = Shape {
        kernel,
        lanes,
        rows,
        chunks: kernel.head_dim / 4,
        units: kernel.head_dim / kernel.storage.unit_elements(),
    };
    let mut t = Text::default();
    t.line(format!(
        "// attend, subgroup broadcast, {}, head dim {}: subgroups of {lanes}, {rows} query rows in each lane",
        kernel.storage.name(),
        kernel.head_dim
    ));
    t.lines(&super::prelude(kernel));
    t.line(format!("@compute @workgroup_size({lanes})"));
    t.block(
        "fn main(@builtin(workgroup_id) group_id: vec3<u32>, @builtin(subgroup_invocation_id) lane: u32)",
        |t| {
            super::item(t);
            shape.begin(t);
            super::runs(t, "full_runs", "partial_runs", |t| shape.keys(t, false));
            super::runs(t, "partial_runs", "runs_end", |t| shape.keys(t, true));
            shape.end(t);
        },
    );
    t.finish()
}

/// What the text depends on.
struct Shape {
    kernel: AttendKernel,
    lanes: u32,
    /// Query rows of a lane.
    rows: u32,
    /// Chunks of 4 elements in a head.
    chunks: u32,
    /// 16-byte units in a head.
    units: u32,
}

impl Shape {
    /// Rows, spans, Q and the state.
    fn begin(&self, t: &mut Text) {
        for load in 0..self.loads() {
            // Behind the head, lanes fetch its last unit again, and nobody asks them for it.
            t.line(format!(
                "let unit{load} = min(lane + {}u, {}u);",
                load * self.lanes,
                self.units - 1
            ));
        }
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
let ml{r} = state_ml[ml_at{r}];
var m{r} = base2_of(ml{r}.x);
var l{r} = ml{r}.y;
var seen{r} = full_runs < partial_runs;",
                self.lanes * self.rows,
                self.lanes * r,
                self.chunks
            ));
            for u in 0..self.units {
                t.line(format!("let q_unit{r}_{u} = q[q_at{r} + {u}u];"));
                for half in 0..self.unit_chunks() {
                    let c = u * self.unit_chunks() + half;
                    t.line(format!(
                        "let q{r}_{c} = chunk_{half}(q_unit{r}_{u}) * params.q_scale;"
                    ));
                }
            }
            for c in 0..self.chunks {
                t.line(format!("var a{r}_{c} = state_a[a_at{r} + {c}u];"));
            }
        }
    }

    /// The keys of one run.
    fn keys(&self, t: &mut Text, partial: bool) {
        t.line("var k_at = k_base + first * params.k_row;");
        t.line("var v_at = v_base + first * params.v_row;");
        t.block("for (var key = first; key < end; key++)", |t| {
            self.fetch(t, "k");
            for c in 0..self.chunks {
                t.line(format!("let kb{c} = {};", self.broadcast("k", c)));
                for r in 0..self.rows {
                    if c == 0 {
                        t.line(format!("var s{r} = q{r}_0 * kb0;"));
                    } else {
                        t.line(format!("s{r} = fma(q{r}_{c}, kb{c}, s{r});"));
                    }
                }
            }
            if partial {
                t.line("let position = positions[params.keys_at + key];");
            }
            for r in 0..self.rows {
                self.weight(t, partial, r);
            }
            self.fetch(t, "v");
            for c in 0..self.chunks {
                t.line(format!("let vb{c} = {};", self.broadcast("v", c)));
                for r in 0..self.rows {
                    let value = if partial {
                        format!("select(vec4<f32>(), vb{c}, vis{r})")
                    } else {
                        format!("vb{c}")
                    };
                    t.line(format!(
                        "a{r}_{c} = fma({value}, vec4<f32>(p{r}), a{r}_{c} * corr{r});"
                    ));
                }
            }
            t.line("k_at += params.k_row;");
            t.line("v_at += params.v_row;");
        });
    }

    /// Logit, maximum and weight of one row.
    fn weight(&self, t: &mut Text, partial: bool, r: u32) {
        t.line(format!("let dot{r} = (s{r}.x + s{r}.y) + (s{r}.z + s{r}.w);"));
        let logit = if self.kernel.softcap {
            format!("capped(dot{r})")
        } else {
            format!("dot{r}")
        };
        if partial {
            t.line(format!("let vis{r} = lo{r} <= position && position < hi{r};"));
            t.line(format!("let x{r} = select(EMPTY_M, {logit}, vis{r});"));
            t.line(format!("seen{r} = seen{r} || vis{r};"));
        } else {
            t.line(format!("let x{r} = {logit};"));
        }
        t.line(format!("let n{r} = max(m{r}, x{r});"));
        t.line(format!("let corr{r} = exp2(m{r} - n{r});"));
        if partial {
            t.line(format!("let p{r} = select(0.0f, exp2(x{r} - n{r}), vis{r});"));
        } else {
            t.line(format!("let p{r} = exp2(x{r} - n{r});"));
        }
        t.line(format!("m{r} = n{r};"));
        t.line(format!("l{r} = fma(l{r}, corr{r}, p{r});"));
    }

    /// Writes the state of rows that saw a key.
    fn end(&self, t: &mut Text) {
        for r in 0..self.rows {
            t.block(format!("if (in{r} && seen{r})"), |t| {
                for c in 0..self.chunks {
                    t.line(format!("state_a[a_at{r} + {c}u] = a{r}_{c};"));
                }
                t.line(format!(
                    "let m = select(natural_of(m{r}), ml{r}.x, m{r} == base2_of(ml{r}.x));"
                ));
                t.line(format!("state_ml[ml_at{r}] = vec2<f32>(m, l{r});"));
            });
        }
    }

    /// Fetches the row at `k_at` or `v_at`: this lane's units, unpacked before they are broadcast.
    fn fetch(&self, t: &mut Text, tensor: &str) {
        for load in 0..self.loads() {
            t.line(format!(
                "let {tensor}_unit{load} = {tensor}[{tensor}_at + unit{load}];"
            ));
            for half in 0..self.unit_chunks() {
                t.line(format!(
                    "let {tensor}_own{load}_{half} = chunk_{half}({tensor}_unit{load});"
                ));
            }
        }
    }

    /// Chunk `c` of the fetched row, in every lane.
    fn broadcast(&self, tensor: &str, c: u32) -> String {
        let unit = c / self.unit_chunks();
        format!(
            "subgroupBroadcast({tensor}_own{}_{}, {}u)",
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
