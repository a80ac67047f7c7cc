//! Cost of one decoded token over a cache: 8 query heads, 2 heads of keys and values of dim 64,
//! f32, on the CPU, with ranks in one process. The floor is the time in kernels (`compute`) and a
//! bare vote (see the bench `calls`). `layers` sessions calls of one step share a plan.
//!
//! `cargo bench -p kyklos --bench decode -- [--short]`

use std::time::Instant;

use kyklos::backend::Device;
use kyklos::local::on_threads;
use kyklos::{Attention, CacheOptions, Dtype, Execution, KvCache, Mask, Session, Tensor};
use kyklos_transport::in_process_group;

fn main() -> kyklos::Result<()> {
    let short = std::env::args().any(|argument| argument == "--short");
    let steps = if short { 20 } else { 200 };
    println!("ranks,cached,layers,first_layer_us,other_layers_us,compute_us");
    for ranks in [1, 2, 4] {
        for cached in [1024, 16 * 1024, 128 * 1024] {
            for layers in [1, 4] {
                let [first, others, compute] = cost(ranks, cached, layers, steps)?;
                println!("{ranks},{cached},{layers},{first:.1},{others:.1},{compute:.1}");
            }
        }
    }
    Ok(())
}

/// Medians in microseconds on rank 0: of the first layer of a step, of its other layers, and of the
/// time in kernels.
fn cost(ranks: u32, cached: usize, layers: usize, steps: usize) -> kyklos::Result<[f64; 3]> {
    let costs = on_threads(in_process_group(ranks), |transport| {
        let mut session = Session::new(transport, Device::cpu());
        let call = Attention::new().mask(Mask::causal()).execution(Execution::new().same_queries());
        let tensor = |tokens: usize, heads: usize| {
            Tensor::new([1, tokens, heads, 64], vec![0.5_f32; tokens * heads * 64])
        };
        let mut caches: Vec<KvCache> = Vec::new();
        for _ in 0..layers {
            let mut cache = session.kv_cache(CacheOptions::new([1, 2, 64], Dtype::F32))?;
            // The prompt: without queries, it is only appended.
            let kv = tensor(cached, 2)?;
            session.attend_cached(&call, &mut cache, &tensor(0, 8)?, &kv, &kv)?;
            caches.push(cache);
        }
        let (q, kv) = (tensor(1, 8)?, tensor(1, 2)?);
        let (mut first, mut others, mut compute) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..steps {
            for (layer, cache) in caches.iter_mut().enumerate() {
                let started = Instant::now();
                let output = session.attend_cached(&call, cache, &q, &kv, &kv)?;
                let took = started.elapsed().as_secs_f64() * 1e6;
                if layer == 0 {
                    first.push(took)
                } else {
                    others.push(took)
                }
                compute.push(output.report.compute_ns as f64 / 1e3);
            }
        }
        Ok::<_, kyklos::Error>([first, others, compute].map(median))
    });
    costs.into_iter().next().expect("at least one rank")
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
