//! Forty layers on one session: the ranks plan once and vote once for all layers.

use kyklos::backend::Device;
use kyklos::local::on_threads;
use kyklos::{
    Attention, CallShapes, Execution, Mask, Mesh, PlacementKind, Session, Tensor, in_process_group,
};

const LAYERS: u32 = 40;

fn main() -> kyklos::Result<()> {
    let reports = on_threads(in_process_group(2), |group| {
        let mut session = Session::new(group, Device::cpu());
        // Zigzag: under a causal mask both ranks have the same work.
        let execution = Execution::new().mesh(Mesh::new(1, 2)?).placement(PlacementKind::Zigzag);
        let call = Attention::new().mask(Mask::causal()).execution(execution);
        let mut hidden = Tensor::new([1, 128, 4, 64], vec![0.25_f32; 128 * 4 * 64])?;
        let mut report = None;
        // A rank that makes fewer calls than it announced ends the group, with an error on all ranks.
        let mut layers = session.prepare(&call, &CallShapes::of(&hidden, &hidden), LAYERS)?;
        for _ in 0..LAYERS {
            // A model computes q, k and v from the output of the layer before. The output stays on the
            // device.
            let output = layers.run(&hidden, &hidden, &hidden)?;
            hidden = output.o;
            report = Some(output.report);
        }
        Ok::<_, kyklos::Error>(report)
    });
    for (rank, report) in reports.into_iter().enumerate() {
        let Some(report) = report? else { continue };
        println!("rank {rank}: {LAYERS} layers, the last one sent {} bytes", report.bytes_sent);
    }
    Ok(())
}
