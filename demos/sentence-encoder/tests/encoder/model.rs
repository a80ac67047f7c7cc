//! The network itself: against transformers, and what it computes if a part of the work is left out.

use crate::{ROUNDING, encoder, packed, reference};
use candle_core::Tensor;
use sentence_encoder::alone;
use sentence_encoder::model::directions;
use sentence_encoder::nearest::{cosine, largest_difference};
use sentence_encoder::texts::Packed;

#[test]
fn the_embeddings_are_those_of_transformers() {
    let (encoder, packed) = (encoder(), packed());
    let embeddings = alone::encode(&encoder, &packed).unwrap();
    let reference = reference();
    let first: Vec<Vec<f32>> = embeddings.iter().map(|embedding| embedding[..8].to_vec()).collect();
    assert!(largest_difference(&first, &reference.first_numbers) < ROUNDING);
    let cosines: Vec<Vec<f32>> =
        embeddings.iter().map(|a| embeddings.iter().map(|b| cosine(a, b)).collect()).collect();
    assert!(largest_difference(&cosines, &reference.cosines) < ROUNDING);
}

/// The embeddings of a model whose tokens see others than those of their text.
fn with_attention(packed: &Packed, shards: &[usize]) -> Vec<Vec<f32>> {
    let encoder = encoder();
    let hidden = encoder.run(&packed.ids, &packed.positions, |qkv| {
        let shard = |ends: &[usize]| {
            let part = |tensor: &Tensor| tensor.narrow(0, ends[0], ends[1] - ends[0]);
            let [q, k, v] = &qkv;
            alone::attend([part(q)?, part(k)?, part(v)?])
        };
        let shards: Vec<Tensor> = shards.windows(2).map(shard).collect::<Result<_, _>>()?;
        Ok(Tensor::cat(&shards, 0)?)
    });
    let hidden = hidden.unwrap();
    let mean =
        |ends: &[u32]| hidden.narrow(0, ends[0] as usize, (ends[1] - ends[0]) as usize).unwrap().mean(0);
    let means: Vec<Tensor> = packed.boundaries.windows(2).map(|ends| mean(ends).unwrap()).collect();
    directions(&Tensor::stack(&means, 0).unwrap()).unwrap()
}

#[test]
fn without_the_mask_of_texts_or_without_the_other_ranks_the_embeddings_are_wrong() {
    let packed = packed();
    let right = alone::encode(&encoder(), &packed).unwrap();
    let texts: Vec<usize> = packed.boundaries.iter().map(|end| *end as usize).collect();
    let tokens = packed.ids.len();
    assert!(largest_difference(&with_attention(&packed, &texts), &right) < ROUNDING, "the control itself");
    assert!(largest_difference(&with_attention(&packed, &[0, tokens]), &right) > 100.0 * ROUNDING);

    // Each of two ranks attends to its own tokens only, and one text is on both.
    let mut cut = texts.clone();
    let middle = texts[7] + 3;
    assert!(middle < texts[8]);
    cut.insert(8, middle);
    assert!(largest_difference(&with_attention(&packed, &cut), &right) > 100.0 * ROUNDING);
}

#[test]
fn positions_begin_anew_with_each_text() {
    let mut packed = packed();
    let right = alone::encode(&encoder(), &packed).unwrap();
    packed.positions = (0..).take(packed.ids.len()).collect();
    assert!(largest_difference(&alone::encode(&encoder(), &packed).unwrap(), &right) > 100.0 * ROUNDING);
}
