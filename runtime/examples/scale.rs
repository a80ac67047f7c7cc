//! Scale on paper: what the simulator expects of 8 to 2048 ranks, for the shapes of video and image
//! generation and of a long prefill, on two descriptions of `clusters/`, or on the files that the
//! arguments name.
//!
//! `cargo run --release -p kyklos --example scale [-- clusters/h100-infiniband.toml …]`

use std::time::Instant;

use kyklos::plan::{bytes, table};
use kyklos::simulate::{Cluster, EstimatedPlan, PlanQuery, choose};
use kyklos::{AttentionProblem, Dtype, Mask, PlacementKind, Split};

const H100: &str = include_str!("../../clusters/h100-infiniband.toml");
const TPU: &str = include_str!("../../clusters/tpu-v7x-like.toml");

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = std::env::args_os().skip(1).map(std::fs::read_to_string);
    let mut descriptions = files.collect::<Result<Vec<_>, _>>()?;
    if descriptions.is_empty() {
        descriptions = [H100, TPU].map(str::to_owned).into();
    }
    let cases = [
        ("Wan 720p, one layer", [1, 75_600, 40, 40, 128], Mask::full()),
        ("FLUX, one layer", [1, 4608, 24, 24, 128], Mask::full()),
        ("causal prefill of 1 Mi tokens, one layer", [1, 1 << 20, 64, 8, 128], Mask::causal()),
    ];
    for description in descriptions {
        let described = Cluster::from_toml(&description)?;
        for (name, shape, mask) in &cases {
            let problem = AttentionProblem::new(*shape, Dtype::Bf16, mask.clone())?;
            println!("{name}: {shape:?} bf16 {mask}, on {}\n", described.name());
            print!("{}", scale(&problem, &described)?);
            println!("efficiency: of what 8 ranks reach together; - : refused");
            println!("* extrapolated from two shorter rings with shards of the same size\n");
        }
    }
    Ok(())
}

fn scale(problem: &AttentionProblem, described: &Cluster) -> kyklos::Result<String> {
    let mut rows = Vec::new();
    let mut first_ms = None;
    for ranks in (3..=11).map(|power| 1_u32 << power) {
        let started = Instant::now();
        let cluster = described.grown_for(ranks)?;
        // The one that levels the work. Under a causal mask hops of contiguous shards differ, and thousands
        // of them take minutes to walk.
        let level = if problem.mask.is_full() { PlacementKind::Contiguous } else { PlacementKind::Zigzag };
        let wanted = PlanQuery {
            ranks,
            mesh: None,
            strategy: None,
            placement: Some(level),
            split: Split::Even,
            gradients: false,
        };
        let priced = choose(problem, &wanted, &cluster)?;
        let seconds = started.elapsed().as_secs_f64();
        let fitting: Vec<_> =
            priced.iter().filter_map(|priced| Some((priced, priced.prediction()?))).collect();
        let Some((best, prediction)) = fitting.first() else {
            rows.push(vec![ranks.to_string(), "nothing fits".to_owned()]);
            continue;
        };
        let ms = prediction.wall_s() * 1e3;
        let base = *first_ms.get_or_insert(ms * f64::from(ranks));
        let of = |test: &dyn Fn(&EstimatedPlan) -> bool| {
            let found = fitting.iter().find(|(priced, _)| test(priced));
            found.map_or_else(
                || "-".to_owned(),
                |(_, prediction)| {
                    format!(
                        "{:.3}{}",
                        prediction.wall_s() * 1e3,
                        if prediction.extrapolated { "*" } else { "" }
                    )
                },
            )
        };
        rows.push(vec![
            ranks.to_string(),
            format!("{ms:.3}{}", if prediction.extrapolated { "*" } else { "" }),
            format!("{:.0} %", 100.0 * base / (ms * f64::from(ranks))),
            best.candidate.to_string(),
            format!("{:.0} %", prediction.overlap() * 100.0),
            bytes(prediction.bytes_sent()),
            bytes(prediction.peak_bytes()),
            of(&|priced| priced.candidate.mesh.ring() == 1),
            of(&|priced| priced.candidate.mesh.ulysses() == 1),
            format!("{} in {seconds:.1} s", priced.len()),
        ]);
    }
    let header = [
        "ranks",
        "best ms",
        "efficiency",
        "which",
        "computing",
        "sent a rank",
        "peak a rank",
        "all Ulysses ms",
        "all ring ms",
        "plans priced",
    ];
    for row in &mut rows {
        row.resize(header.len(), String::new());
    }
    Ok(table(&header, rows))
}
