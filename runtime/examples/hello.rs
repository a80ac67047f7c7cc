//! Attention over the tokens of two ranks in this process.

use kyklos::backend::Device;
use kyklos::local::on_threads;
use kyklos::{Attention, Mask, Session, Tensor, in_process_group};

fn main() -> kyklos::Result<()> {
    // Each rank holds its part of the sequence: 5 tokens here, 3 there; 4 query heads share 2 key/value
    // heads of dim 32.
    let outputs = on_threads(in_process_group(2), |group| {
        let tokens = [5, 3][group.rank().0 as usize];
        let mut session = Session::new(group, Device::cpu());
        let made_up = |heads: usize, factor: f32| {
            let values = (0..tokens * heads * 32).map(|index| (index as f32 * factor).sin()).collect();
            Tensor::new([1, tokens, heads, 32], values)
        };
        let (q, k, v) = (made_up(4, 0.7)?, made_up(2, 1.1)?, made_up(2, 1.3)?);
        let output = session.attend(&Attention::new().mask(Mask::causal()), &q, &k, &v)?;
        output.o.to_vec::<f32>()
    });
    for (rank, output) in outputs.into_iter().enumerate() {
        let output = output?;
        println!("rank {rank}: {} elements, the first is {:.4}", output.len(), output[0]);
    }
    Ok(())
}
