//! One rank of a group that a launcher has started: torchrun, mpirun, srun or Kubernetes.
//! Without a launcher it is a group of one.

use std::time::Duration;

use kyklos::backend::Device;
use kyklos::{Attention, Mask, Session, Tensor};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let group = kyklos::launch::from_env()?;
    let mut session = Session::new(group, Device::cpu());
    let values = Tensor::new([1, 256, 8, 64], vec![0.5_f32; 256 * 8 * 64])?;
    let output = session.attend(&Attention::new().mask(Mask::causal()), &values, &values, &values)?;
    println!("rank {}: output of shape {:?}", session.rank(), output.o.shape());
    // A rank that ends without this has died, as far as its peers know.
    session.close(Duration::from_secs(60))?;
    Ok(())
}
