//! Two ranks over QUIC with mutual TLS, on loopback sockets of this process. Between hosts, each
//! rank has its own process and identity file, and `kyklos::launch::from_env` forms the group (see
//! `from_launcher`).

use kyklos::backend::Device;
use kyklos::local::on_threads;
use kyklos::transport::quic::quic_loopback_group;
use kyklos::{Attention, Execution, Session, Strategy, Tensor};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let call = Attention::new().execution(Execution::new().strategy(Strategy::Ring));
    let outputs = on_threads(quic_loopback_group(2)?, |group| {
        let mut session = Session::new(group, Device::cpu());
        let ones = Tensor::new([1, 64, 8, 64], vec![1.0_f32; 64 * 8 * 64])?;
        let output = session.attend(&call, &ones, &ones, &ones)?;
        // 128 equal keys: the log-sum-exp of each row is 64 / √64 + ln 128.
        Ok::<_, kyklos::Error>((output.lse.to_vec::<f32>()?[0], output.report.bytes_sent))
    });
    for (rank, output) in outputs.into_iter().enumerate() {
        let (lse, bytes) = output?;
        assert!((lse - (8.0 + 128.0_f32.ln())).abs() < 1e-4, "{lse}");
        println!("rank {rank}: log-sum-exp {lse:.4}, {bytes} bytes sent");
    }
    Ok(())
}
