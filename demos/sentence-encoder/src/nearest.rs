//! Which embeddings are close to each other.

/// The cosine of the angle between two embeddings of length 1.
pub fn cosine(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// All embeddings but the `excluded` one by their cosine with `query`, the closest first.
pub fn by_cosine(query: &[f32], embeddings: &[Vec<f32>], excluded: Option<usize>) -> Vec<(usize, f32)> {
    let others = embeddings.iter().enumerate().filter(|(index, _)| Some(*index) != excluded);
    let mut found: Vec<(usize, f32)> =
        others.map(|(index, embedding)| (index, cosine(query, embedding))).collect();
    found.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    found
}

/// The largest difference of a number between two lists of embeddings.
pub fn largest_difference(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    let pairs = a.iter().flatten().zip(b.iter().flatten());
    // Not a number is the largest.
    pairs.map(|(a, b)| (a - b).abs()).max_by(f32::total_cmp).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_closest_comes_first_and_the_text_itself_is_left_out() {
        let embeddings = [vec![1.0, 0.0], vec![0.6, 0.8], vec![0.8, 0.6]];
        let found = by_cosine(&embeddings[0], &embeddings, Some(0));
        assert_eq!(found.iter().map(|(index, _)| *index).collect::<Vec<_>>(), [2, 1]);
        assert!((found[0].1 - 0.8).abs() < 1e-6);
        assert_eq!(by_cosine(&embeddings[1], &embeddings, None)[0].0, 1);
    }

    #[test]
    fn a_number_that_is_none_is_a_difference() {
        assert!(largest_difference(&[vec![f32::NAN, 0.0]], &[vec![0.0, 0.0]]).is_nan());
        assert!((largest_difference(&[vec![1.0, 0.0]], &[vec![0.5, 0.0]]) - 0.5).abs() < 1e-6);
    }
}
