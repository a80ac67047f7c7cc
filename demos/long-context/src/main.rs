//! A long context: keys and values of a prompt do not fit the memory of one rank, and fit that of
//! several.
//!
//! The layers of a made-up model attend over key/value caches that the ranks share: first the
//! prompt, in chunks that are split over the ranks, then tokens one by one. Each rank may hold so
//! many bytes of keys and values. The same is tried on 1, 2 and 4 ranks. The last token's attention
//! is compared with f64.
#![forbid(unsafe_code)]

mod model;
mod verify;

use std::io::Write;
use std::process::ExitCode;
use std::time::Instant;

use kyklos::backend::Device;
use kyklos::local::on_threads;
use kyklos::{Attention, CacheOptions, Dtype, Execution, KvCache, Mask, Session};
use kyklos_transport::{Group, in_process_group};

use model::{DIM, KV_HEADS, LAYERS, qkv};
use verify::{Verdict, verify};

/// Any error, with its text for the user.
type Error = Box<dyn std::error::Error + Send + Sync>;

/// What a rank has done.
struct Done {
    /// Of all its layers.
    cache_bytes: u64,
    prompt_s: f64,
    decode_s: f64,
    /// Of the last layer and the last token: o and lse.
    last: (Vec<f32>, Vec<f32>),
}

/// The sizes of a demonstration.
#[derive(Clone, Copy)]
struct Sizes {
    prompt: usize,
    decoded: usize,
}

fn main() -> ExitCode {
    let prompt = std::env::args().nth(1).map_or(Ok(PROMPT), |tokens| tokens.parse());
    let shown = match prompt {
        Ok(prompt @ 1..=MOST_TOKENS) => {
            demonstrate(Sizes { prompt, decoded: DECODED }, &mut std::io::stdout().lock())
        }
        _ => Err(format!("usage: long-context [TOKENS OF THE PROMPT, 1 to {MOST_TOKENS}]").into()),
    };
    match shown {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the demonstration and writes what it finds to `out`.
fn demonstrate(sizes: Sizes, out: &mut dyn Write) -> Result<(), Error> {
    let Sizes { prompt, decoded } = sizes;
    let whole = ((prompt + decoded) * LAYERS * 2 * KV_HEADS * DIM * 4) as u64;
    // A rank may hold two thirds of the whole.
    let budget = whole / 3 * 2;
    writeln!(out, "A prompt of {prompt} tokens, then {decoded} tokens one by one, through {LAYERS} layers.")?;
    writeln!(out, "Keys and values take {}; a rank may hold {}.\n", mib(whole), mib(budget))?;
    writeln!(out, "ranks  cache of a rank     prompt           decoding")?;
    let mut verdicts = Vec::new();
    for ranks in [1, 2, 4] {
        out.flush()?;
        match run(ranks, sizes, budget / LAYERS as u64) {
            Ok(done) => {
                let most = |of: fn(&Done) -> f64| done.iter().map(of).fold(0.0, f64::max);
                let cache = done.iter().map(|rank| rank.cache_bytes).max().unwrap_or(0);
                writeln!(
                    out,
                    "{ranks:>5}  {:>15}  {:>7.0} tokens/s  {:>7.1} tokens/s",
                    mib(cache),
                    prompt as f64 / most(|rank| rank.prompt_s),
                    decoded as f64 / most(|rank| rank.decode_s),
                )?;
                verdicts.push(verify(prompt + decoded, &done[0].last)?);
            }
            // The refusal names the tokens and the room; nothing is lost.
            Err(error) => writeln!(out, "{ranks:>5}  refused: {error}")?,
        }
    }
    let Some(worst) = verdicts.into_iter().max_by(|a, b| a.max_abs_error.total_cmp(&b.max_abs_error)) else {
        return Err("no number of ranks had room".into());
    };
    let Verdict { max_abs_error, tolerance } = worst;
    writeln!(
        out,
        "\nexact  the last token's attention agrees with f64: largest error {max_abs_error:.1e}, allowed {tolerance:.1e}"
    )?;
    writeln!(
        out,
        "       Here all ranks share the cores of this machine. On machines of their own each adds its own."
    )?;
    Ok(())
}

/// The whole conversation on `ranks` ranks of this process. Each layer of a rank may hold `budget`
/// bytes.
fn run(ranks: u32, sizes: Sizes, budget: u64) -> Result<Vec<Done>, Error> {
    let done = on_threads(in_process_group(ranks), |transport| talk(transport, sizes, budget));
    // Every rank has the same refusal, in other words: that of rank 0 is shown.
    done.into_iter().collect::<kyklos::Result<_>>().map_err(Error::from)
}

/// One rank.
fn talk(transport: Group, sizes: Sizes, budget: u64) -> kyklos::Result<Done> {
    let Sizes { prompt, decoded } = sizes;
    let (rank, ranks) = (transport.rank().0 as usize, transport.size() as usize);
    let mut session = Session::new(transport, Device::cpu());
    let options = CacheOptions::new([1, KV_HEADS as u32, DIM as u32], Dtype::F32).max_bytes(budget);
    let mut caches =
        (0..LAYERS).map(|_| session.kv_cache(options.clone())).collect::<kyklos::Result<Vec<KvCache>>>()?;

    // The prompt, in chunks. Each rank passes its part of a chunk, and keeps the keys of it.
    let call = Attention::new().mask(Mask::causal());
    let began = Instant::now();
    for start in (0..prompt).step_by(CHUNK) {
        let tokens = CHUNK.min(prompt - start);
        let own = start + tokens * rank / ranks..start + tokens * (rank + 1) / ranks;
        for (layer, cache) in caches.iter_mut().enumerate() {
            let [q, k, v] = qkv(layer, own.clone())?;
            session.attend_cached(&call, cache, &q, &k, &v)?;
        }
    }
    let prompt_s = began.elapsed().as_secs_f64();

    // Every rank computes the same new token; one of them keeps its keys. One vote is for all layers.
    let call = call.execution(Execution::new().same_queries());
    let began = Instant::now();
    let mut last = (Vec::new(), Vec::new());
    for position in prompt..prompt + decoded {
        let [q, k, v] = qkv(0, position..position + 1)?;
        let mut layers = session.cached_calls(&call, &mut caches, &q, &k, &v)?;
        let mut output = None;
        for layer in 0..LAYERS {
            let [q, k, v] = qkv(layer, position..position + 1)?;
            output = Some(layers.attend(&q, &k, &v)?);
        }
        if let Some(output) = output {
            last = (output.o.to_vec()?, output.lse.to_vec()?);
        }
    }
    let decode_s = began.elapsed().as_secs_f64();
    let cache_bytes = caches.iter().map(KvCache::bytes).sum();
    session.close(std::time::Duration::from_secs(10))?;
    Ok(Done { cache_bytes, prompt_s, decode_s, last })
}

fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

const PROMPT: usize = 16_384;
const DECODED: usize = 64;
const CHUNK: usize = 2048;
const MOST_TOKENS: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_rank_has_no_room_and_several_ranks_are_exact() {
        let mut out = Vec::new();
        demonstrate(Sizes { prompt: 5000, decoded: 9 }, &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains("    1  refused: "), "{text}");
        for words in ["    2 ", "    4 ", "tokens/s", "agrees with f64"] {
            assert!(text.contains(words), "`{words}` is missing in:\n{text}");
        }
    }

    #[test]
    fn a_wrong_last_token_is_noticed() {
        let sizes = Sizes { prompt: 300, decoded: 2 };
        let done = run(2, sizes, u64::MAX).unwrap();
        let (o, lse) = &done[1].last;
        verify(302, &(o.clone(), lse.clone())).unwrap();
        // The attention of the token before it.
        let earlier = run(2, Sizes { decoded: 1, ..sizes }, u64::MAX).unwrap().swap_remove(0).last;
        assert!(verify(302, &earlier).is_err());
    }
}
