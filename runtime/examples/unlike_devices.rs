//! One call over unlike devices: every hardware GPU of this machine, and its cores.

use kyklos::backend::wgpu::WgpuBackend;
use kyklos::backend::{Device, DeviceClass};
use kyklos::local::on_threads;
use kyklos::{Attention, AttentionProblem, Dtype, Execution, Mask, Session, Tensor, in_process_group};

fn main() -> kyklos::Result<()> {
    let gpus = WgpuBackend::enumerate().into_iter().enumerate();
    let gpus = gpus.filter(|(_, info)| info.class < DeviceClass::Cpu);
    let mut devices = gpus.map(|(index, _)| Device::wgpu(index)).collect::<kyklos::Result<Vec<_>>>()?;
    devices.push(Device::cpu());
    let ranks = u32::try_from(devices.len()).unwrap_or(u32::MAX);
    let problem = AttentionProblem::new([1, 4096, 8, 8, 64], Dtype::F32, Mask::causal())?;
    let reports = on_threads(in_process_group(ranks), |group| {
        let rank = group.rank();
        let mut session = Session::new(group, devices[rank.0 as usize].clone());
        // As many tokens for each rank that all of them end at the same time.
        let shared = session.share(&problem, &Execution::new())?;
        let shape = [1, shared.queries.of_rank(rank).len(), 8, 64];
        let values = Tensor::new(shape, vec![0.5_f32; shape.iter().product()])?;
        let call = Attention::new().mask(Mask::causal()).execution(shared.execution(Execution::new()));
        let output = session.attend(&call, &values, &values, &values)?;
        Ok::<_, kyklos::Error>(output.report)
    });
    for (device, report) in devices.iter().zip(reports) {
        let report = report?;
        println!(
            "{}: {} tokens, computed for {} us",
            device.info().name,
            report.tokens,
            report.compute_ns / 1000
        );
    }
    Ok(())
}
