//! A prompt that is split over two ranks, then tokens one by one, over a key/value cache that the
//! ranks share.

use kyklos::backend::Device;
use kyklos::local::on_threads;
use kyklos::{Attention, CacheOptions, Dtype, Execution, Mask, Session, Tensor, in_process_group};

const HEADS: usize = 8;
const KV_HEADS: usize = 2;
const DIM: usize = 64;

/// A model computes q, k and v of its tokens; these are made up from their positions.
fn model(positions: std::ops::Range<usize>) -> kyklos::Result<[Tensor; 3]> {
    let tensor = |heads: usize, factor: f32| {
        let row = |position: usize| {
            (0..heads * DIM).map(move |index| ((position * 97 + index) as f32 * factor).sin())
        };
        Tensor::new([1, positions.len(), heads, DIM], positions.clone().flat_map(row).collect())
    };
    Ok([tensor(HEADS, 0.7)?, tensor(KV_HEADS, 1.1)?, tensor(KV_HEADS, 1.3)?])
}

fn main() -> kyklos::Result<()> {
    let held = on_threads(in_process_group(2), |group| {
        let mut session = Session::new(group, Device::cpu());
        let options =
            CacheOptions::new([1, KV_HEADS as u32, DIM as u32], Dtype::F32).max_bytes(64 << 20).block(16);
        let mut cache = session.kv_cache(options)?;

        // The prompt: rank 0 has the first 40 tokens, rank 1 the next 24. Their keys stay where they are.
        let prompt = Attention::new().mask(Mask::causal());
        let [q, k, v] = model([0..40, 40..64][session.rank().0 as usize].clone())?;
        session.attend_cached(&prompt, &mut cache, &q, &k, &v)?;

        // Decoding: both ranks pass the same new token, and both get its output. One of them keeps its key.
        let decode = prompt.execution(Execution::new().same_queries());
        for position in 64..128 {
            let [q, k, v] = model(position..position + 1)?;
            session.attend_cached(&decode, &mut cache, &q, &k, &v)?;
        }

        // Speculation: four tokens at once, of which the last two are rejected.
        let [q, k, v] = model(128..132)?;
        let output = session.attend_cached(&decode, &mut cache, &q, &k, &v)?;
        assert_eq!(output.o.shape(), [1, 4, HEADS, DIM]);
        cache.truncate(130)?;
        Ok::<_, kyklos::Error>((cache.tokens(session.rank()).len(), cache.bytes()))
    });
    for (rank, held) in held.into_iter().enumerate() {
        let (tokens, bytes) = held?;
        println!("rank {rank}: keys and values of {tokens} of 130 tokens, in {bytes} bytes");
    }
    Ok(())
}
