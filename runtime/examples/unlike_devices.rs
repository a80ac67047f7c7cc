//! One call over unlike devices: every hardware GPU of this machine, and its cores.

use kyklos::backend::wgpu::WgpuBackend;
use kyklos::backend::{Device, DeviceClass};
use kyklos::local::on_threads;
use kyklos::{Attention, Mask, Session, Tensor};
use kyklos_transport::in_process_group;

fn main() -> kyklos::Result<()> {
    let gpus = WgpuBackend::enumerate().into_iter().enumerate();
    let gpus = gpus.filter(|(_, info)| info.class < DeviceClass::Cpu);
    let mut devices = gpus.map(|(index, _)| Device::wgpu(index)).collect::<kyklos::Result<Vec<_>>>()?;
    devices.push(Device::cpu());
    // A rank may hold any number of tokens: a GPU gets seven times as many here.
    let tokens: Vec<usize> =
        devices.iter().map(|device| if device.info().backend == "cpu" { 64 } else { 448 }).collect();
    let ranks = u32::try_from(devices.len()).unwrap_or(u32::MAX);
    let reports = on_threads(in_process_group(ranks), |transport| {
        let rank = transport.rank().0 as usize;
        let mut session = Session::new(transport, devices[rank].clone());
        let shape = [1, tokens[rank], 8, 64];
        let values = Tensor::new(shape, vec![0.5_f32; shape.iter().product()])?;
        let output = session.attend(&Attention::new().mask(Mask::causal()), &values, &values, &values)?;
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
